"""A script that asks a LLaVA folder about images: vlm_answers.py FOLDER OUT"""

import sys

import torch
from PIL import Image

from forge_vlm import VLM, Processor

processor = Processor.from_pretrained(sys.argv[1])
model = VLM.from_pretrained(sys.argv[1], dtype=torch.float32)
images = [Image.new("RGB", size, color) for size, color in (((20, 24), "red"), ((30, 16), "blue"))]
questions = ["<image> color?", "is <image> blue?"]
inputs = processor(questions, images)

both = model.generate(**inputs, max_new_tokens=4)
each = [model.generate(**processor(q, i), max_new_tokens=4) for q, i in zip(questions, images)]
assert torch.equal(both, torch.cat(each))  # padding and the other image change nothing
with torch.no_grad():
    logits = model(**inputs)
last = logits[:, -1].argmax(-1)
assert torch.equal(last, both[:, 0])
model.save_pretrained(sys.argv[2])
again = VLM.from_pretrained(sys.argv[2])
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
print("answers", len(processor.batch_decode(both)))

"""The handwritten digits of scikit-learn as conversations: 1,437 to learn from, 360 held out.

    python -m examples.digits.write runs/digits_data

Writes train.jsonl and held_out.jsonl, a picture of 32 x 32 pixels for each record, and a tokenizer of words.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

QUESTION = "which digit is this ?"
SPECIALS = ["<pad>", "<image>", "<|im_start|>", "<|im_end|>"]  # rows are filled with id 0
WORDS = ["user", "assistant", *QUESTION.split(), *map(str, range(10))]


def write(folder: Path) -> None:
    """All files; sorted by chance, but each time alike."""
    from PIL import Image
    from sklearn.datasets import load_digits

    data = load_digits()
    grey = (data.images * (255 / 16)).astype(np.uint8).repeat(4, 1).repeat(4, 2)  # (N, 32, 32)
    order = np.random.default_rng(0).permutation(len(grey))
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for name, chosen in (("train", order[:1437]), ("held_out", order[1437:])):
        lines = []
        for i in map(int, chosen):
            Image.fromarray(grey[i]).save(folder / f"pictures/{i}.png")
            lines.append(json.dumps({"messages": messages(i, str(data.target[i]))}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer.json").write_text(tokenizer())


def messages(number: int, answer: str) -> list[dict[str, object]]:
    """A question about a picture, and its answer."""
    picture = {"type": "image", "image": f"pictures/{number}.png"}
    asked = [picture, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def tokenizer() -> str:
    """The JSON of a tokenizer that knows the words of the template, the question and the answers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate([*SPECIALS, *WORDS])}
    found = Tokenizer(models.WordLevel(vocabulary))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found.add_special_tokens(SPECIALS)
    return found.to_str()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)

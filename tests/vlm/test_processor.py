"""`Processor` against the processors of transformers: ids, pixels and answers of tiny folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from forge_testing.problems import rejects
from forge_vlm import VLM, Processor
from forge_vlm.resolution import ResolutionConfig

pytestmark = pytest.mark.lane("test")

README = Path(__file__).parents[2] / "packages/forge-vlm/README.md"
MARKS = ["<s>", "</s>", "<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]  # fmt: skip
IMAGE, PAD, VIDEO = 258, 259, 260
TEXT: dict[str, Any] = {
    **{"vocab_size": 264, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128},
}
CLIP = {
    **{"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8},
}
QWEN_TEXT = {
    **TEXT,
    "head_dim": 16,
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e4},
        **{"mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
}
QWEN_VISION = {
    **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4},
    **{"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}


def tokenizer() -> Any:
    """Bytes, marks of images, and a token before each text."""
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(MARKS)
    pair = {"single": "<s> $A", "special_tokens": [("<s>", 256)]}
    made.post_processor = tokenizers.processors.TemplateProcessing(**pair)
    given: dict[str, Any] = {"eos_token": "</s>", "pad_token": "</s>", "padding_side": "left"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **given)


def save(model: Any, processor: Any, folder: Path) -> tuple[Any, Any]:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def llava(folder: Path, **options: Any) -> tuple[Any, Any]:
    text = transformers.LlamaConfig(**TEXT).to_dict()
    config = transformers.LlavaConfig(vision_config=CLIP, text_config=text, image_token_index=IMAGE)  # type: ignore[arg-type]
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil as Pixels

    size = {"height": 16, "width": 16}
    pixels = Pixels(size={"shortest_edge": 16}, crop_size=size)
    parts: dict[str, Any] = {"patch_size": 8, "vision_feature_select_strategy": "default"}
    processor = transformers.LlavaProcessor(
        pixels, tokenizer(), image_token="<image>", num_additional_image_tokens=1, **parts
    )
    return save(transformers.LlavaForConditionalGeneration(config), processor, folder)


def qwen(folder: Path) -> tuple[Any, Any]:
    config = transformers.Qwen3VLConfig(
        text_config=QWEN_TEXT, vision_config=QWEN_VISION, image_token_id=PAD, video_token_id=VIDEO
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil as Pixels,
    )

    bounds = {"shortest_edge": 64, "longest_edge": 512}
    pixels = Pixels(patch_size=4, merge_size=2, temporal_patch_size=2, size=bounds)
    return save(
        transformers.Qwen3VLForConditionalGeneration(config),
        _QwenInputs(pixels, tokenizer()),
        folder,
    )


class _QwenInputs:
    """The image processor and tokenizer of Qwen3-VL, whose processor class wants one for videos, too."""

    def __init__(self, pixels: Any, tokens: Any) -> None:
        self.pixels, self.tokens = pixels, tokens

    def save_pretrained(self, folder: Path) -> None:
        self.pixels.save_pretrained(folder)
        self.tokens.save_pretrained(folder)

    def __call__(self, images: Any, text: list[str], **options: Any) -> dict[str, Tensor]:
        out = self.pixels(images=images, return_tensors="pt")
        counts = iter((out["image_grid_thw"].prod(1) // 4).tolist())
        whole = []
        for part in text:
            first, *rest = part.split("<|image_pad|>")
            whole.append(first + "".join("<|image_pad|>" * next(counts) + r for r in rest))
        found = self.tokens(whole, padding=True, return_tensors="pt")
        kinds = (found["input_ids"] == PAD).long()
        return {**found, **out, "mm_token_type_ids": kinds}


def images() -> list[Any]:
    from PIL import Image

    torch.manual_seed(1)
    sizes = ((20, 24), (33, 18), (16, 16))
    return [Image.fromarray(torch.randint(256, (*s, 3), dtype=torch.uint8).numpy()) for s in sizes]


@pytest.mark.parametrize("kind", ["llava", "qwen"])
def test_inputs_and_answers_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    mark = "<image>" if kind == "llava" else "<|vision_start|><|image_pad|><|vision_end|>"
    theirs, inputs = llava(tmp_path) if kind == "llava" else qwen(tmp_path)
    texts = [f"{mark} and {mark}: which is redder?", f"what is {mark}"]
    wanted = inputs(images=images(), text=texts, padding=True, return_tensors="pt")

    processor = Processor.from_pretrained(tmp_path)
    found = processor(texts, [images()[:2], images()[2:]])
    seen = found["document_ids"] >= 0
    assert torch.equal(seen, wanted["attention_mask"].bool())
    assert torch.equal(found["tokens"][seen], wanted["input_ids"][seen])
    assert processor.eos_id == (257,)

    model = VLM.from_pretrained(tmp_path)
    pixels = found["images" if kind == "llava" else "patches"]
    mean, std = (torch.tensor(side) for side in model.config.vision.pixels)
    each = pixels.view(len(pixels), 3, -1) / 255
    normal = ((each - mean[:, None]) / std[:, None]).view(pixels.shape)
    torch.testing.assert_close(normal, wanted["pixel_values"].view(pixels.shape), rtol=0, atol=1e-5)
    if kind == "qwen":
        assert torch.equal(found["grids"], wanted["image_grid_thw"])

    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    new = theirs.generate(**wanted, **options, pad_token_id=257)[:, wanted["input_ids"].size(1) :]
    assert torch.equal(model.generate(**found, max_new_tokens=5), new)
    right = Processor.from_pretrained(tmp_path, padding_side="right")(texts, images())
    assert torch.equal(model.generate(**right, max_new_tokens=5), new)
    assert processor.decode([*b"red", 257, 7]) == processor.batch_decode([[*b"red"]])[0]


def test_the_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qwen(tmp_path / "Qwen3-VL-2B-Instruct")
    images()[0].save(tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "Qwen3-VL-2B-Instruct" in block)
    seen: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), seen)
    assert seen["answers"].shape[0] == 2
    kind = transformers.Qwen3VLForConditionalGeneration
    _, info = kind.from_pretrained(tmp_path / "copy", output_loading_info=True)
    assert not any(info.values()), info


def test_a_model_of_text_and_images_of_its_own(tmp_path: Path) -> None:
    options: dict[str, Any] = {"placeholder": "<image>", "image_id": IMAGE, "tokens_per_tile": 3}
    processor = Processor(tokenizer(), ResolutionConfig(), **options)
    found = processor(["a <image>", "b"], images()[0])
    assert found["tokens"].tolist()[0].count(IMAGE) == 3
    assert found["images"].shape == (1, 3, 336, 336)
    assert set(processor("no image")) == {"tokens", "document_ids"}
    with rejects("images", 1, "number"):
        processor("no image", images()[0])
    with rejects("padding", False, "lengths"):
        processor(["a", "bcd"], padding=False)
    with rejects("placeholder", "image", "token"):
        Processor(tokenizer(), ResolutionConfig(), **{**options, "placeholder": "image"})
    with rejects("padding_side", "top", "unknown"):
        Processor(tokenizer(), ResolutionConfig(), padding_side="top", **options)  # type: ignore[arg-type]

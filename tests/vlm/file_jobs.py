"""Jobs on files that a test writes: images of several shapes, images as tokens, folders of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forge_testing.vlm_jobs import CLIP, SETTINGS, write_vlm_job

#: The end of each job here.
_SETTINGS = f"[eval]\nevery_steps = 0\n{SETTINGS}"

# ---- images of several shapes

#: Widths and heights of images; the budget keeps their aspect in 2 to 18 patches.
SIZES = [(8, 8), (24, 12), (8, 40), (16, 8), (30, 30)]
COLORS = {"red": (230, 30, 30), "green": (30, 200, 30), "blue": (40, 60, 240)}
_BUDGET = {"multiple": 4, "min_pixels": 32, "max_pixels": 288}
STRIP_OPTIONS: dict[str, Any] = {
    "resolution": {"name": "budget", "budget": _BUDGET},
    **{"patch_size": 4, "merge": 1, "patch_time": 1, "template": "plain"},
}
#: Keys of a job on strips next to its source.
STRIP_KEYS: dict[str, Any] = {
    **{"data.seq_len": 48, "model.max_seq_len": 48, "eval.every_steps": 0},
    "model.modalities.image.first_id": 257,
}


def packed_job(folder: Path, extra: str = "") -> Path:
    """The job of colored squares with the encoder of images of any sizes."""
    job = write_vlm_job(folder, extra)
    job.write_text(job.read_text().replace('name = "vit"', 'name = "packed_vit"'))
    return job


def write_strips(folder: Path) -> Path:
    """40 images of a color, which is the answer; every fourth conversation has none, every fifth two."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(40):
        name, color = list(COLORS.items())[i % 3]
        parts: list[dict[str, Any]] = [{"type": "text", "text": "?"}]
        for j in range(0 if i % 4 == 3 else 2 if i % 5 == 0 else 1):
            Image.new("RGB", SIZES[(i + j) % 5], color).save(folder / f"{i}-{j}.png")
            parts.append({"type": "image", "image": f"{i}-{j}.png"})
        answer = name if len(parts) > 1 else "none"
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    (folder / "strips.jsonl").write_text("\n".join(lines))
    return folder / "strips.jsonl"


def write_numbered(folder: Path, count: int, letters: str, **more: Any) -> Path:
    """Conversations of 0 to 2 images, whose color is (number, image, 0); answers are one to seven of the `letters`."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(count):
        parts: list[dict[str, Any]] = [{"type": "text", "text": "see"}]
        for j in range(i % 3):
            Image.new("RGB", (8, 8), (i, j, 0)).save(folder / f"{i}-{j}.png")
            parts.append({"type": "image", "image": f"{i}-{j}.png"})
        answer = {"role": "assistant", "content": letters[: 1 + i % 7]}
        lines.append(json.dumps({"messages": [{"role": "user", "content": parts}, answer], **more}))
    (folder / "talks.jsonl").write_text("\n".join(lines))
    return folder / "talks.jsonl"


# ---- images as tokens

FIRST, NUMBER, BEGIN, END, EOS = 16, 16, 1, 2, 3
_IDS_JOB = """
run.dir = "RUN"
train = { steps = 4, global_batch = 4 }
[model]
name = "vlm"
vision = { name = "none" }
modalities.image = { first_id = 16, num_ids = 16, discrete = true }
vocab_size = 32
max_seq_len = 32
dim = 32
num_layers = 2
num_heads = 2
[data]
seq_len = 32
sources.drawings = { name = "npy", path = "IDS", npy = { eos_id = 3 } }
"""


def classes_of_images() -> np.ndarray:
    """(8, 4) ids of image tokens."""
    return np.random.default_rng(4).integers(FIRST, FIRST + NUMBER, (8, 4))


def write_ids(folder: Path) -> Path:
    """Documents [class, BEGIN, four image tokens of the class, END]; eight classes."""
    images = classes_of_images()
    kinds = np.random.default_rng(0).integers(8, size=800)
    ids = [np.array([4 + kind, BEGIN, *images[kind], END, EOS]) for kind in kinds]
    np.save(folder / "ids.npy", np.concatenate(ids).astype("<u2"))
    return folder / "ids.npy"


def ids_job(folder: Path, ids: Path) -> Path:
    """`folder/job.toml` on the file of `write_ids`, without an encoder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = _IDS_JOB.replace("RUN", str(folder / "run")).replace("IDS", str(ids))
    (folder / "job.toml").write_text(text + _SETTINGS)
    return folder / "job.toml"


# ---- folders of transformers


def save_clip(folder: Path, full: bool = False, **changes: Any) -> dict[str, torch.Tensor]:
    """A CLIP with random parameters, only its encoder or the full model; the encoder's tensors."""
    import transformers

    torch.manual_seed(7)
    transformers.utils.logging.disable_progress_bar()
    keys = {k: v for k, v in (CLIP | changes).items() if k != "model_type"}
    if full:
        text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        text |= {"num_attention_heads": 2, "vocab_size": 50}
        config = transformers.CLIPConfig(vision_config=keys, text_config=text)
        model = transformers.CLIPModel(config)
        own = model.vision_model
    else:
        own = model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**keys))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.save_pretrained(folder)
    return {f"model.vision.model.{n}": t.clone() for n, t in own.state_dict().items()}


_QWEN_JOB = """
run.dir = "RUN"
init.from = "HF"
train = { steps = 6, global_batch = 4 }
[data]
seq_len = 128
[data.sources.talks]
name = "forge_vlm.data:open_source"
path = "TALKS"
[data.sources.talks.options]
template = "tokenizer"
tokenizer = "HF"
image = "<|image_pad|>"
positions = "mrope"
patch_size = 4
resolution = { name = "budget", budget = { multiple = 8, min_pixels = 64, max_pixels = 1024 } }
"""


def write_qwen3_vl(folder: Path) -> Any:
    """A Qwen3-VL of transformers at `folder/hf`, which is returned, and conversations with images for it."""
    from tests.vlm.qwen3_vl_folder import save, write_talks

    write_talks(folder / "data/talks.jsonl")
    return save(folder / "hf")


def qwen3_vl_job(folder: Path, files: Path) -> Path:
    """`folder/job.toml`: trains on, and begins from, what `write_qwen3_vl` wrote to `files`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = _QWEN_JOB.replace("RUN", str(folder / "run")).replace("HF", str(files / "hf"))
    path = folder / "job.toml"
    path.write_text(text.replace("TALKS", str(files / "data/talks.jsonl")) + _SETTINGS)
    return path


#: Linear layers of blocks and of the encoder that get a low-rank adapter.
OF_TRANSFORMERS = [
    "layers.*.mixer.*_proj",
    "vision.model.encoder.*.q_proj",
    "vision.model.encoder.*.v_proj",
    "vision.model.encoder.*.fc?",
]
OF_QWEN = ["layers.*.mixer.*_proj", "vision.model.*.qkv", "vision.model.*.linear_fc?"]

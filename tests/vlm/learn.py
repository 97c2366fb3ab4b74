"""Does a fusion learn to see? Accuracy of generated answers, and of those to blank and to shuffled pictures.

    python -m tests.vlm.learn [--fusions joint_decoder ...] [--tasks color ...] [--write]

Prints a JSON line for each pair; --write keeps them in docs/data/vlm-learning.json and makes the page from it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tests.vlm.tasks import (
    CHANCE,
    DRAWN,
    EOS,
    IMAGE,
    VOCABULARY,
    Sample,
    batch_of,
    digits,
    expanded,
)

import forge_vlm
from forge_core import OptimizerConfig, SamplingConfig, build_optimizer, cross_entropy, generate
from forge_core.optim import set_lr
from forge_vlm.vision import ViTConfig

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "docs/data/vlm-learning.json"
PAGE = ROOT / "docs/vlm-learning.md"
FUSIONS = ("joint_decoder", "cross_attention", "mixture_of_transformers", "moma")
TASKS = (*DRAWN, "digits")
#: Tokens of a picture in a row.
PER_IMAGE = {name: 1 if name == "cross_attention" else 16 for name in FUSIONS}
#: Steps of 64 samples that a task takes, and how many times as many where gates begin at zero.
STEPS = {
    "color": 250,
    "left_of": 1800,
    "count": 900,
    "two_images": 700,
    "motion": 900,
    "digits": 900,
}
LONGER = {"cross_attention": 1.6}


#: Images that a token sees by cross-attention; a group of them has no order, which a motion needs.
SEES: dict[str, Literal["last", "group", "all"]] = {"motion": "last"}


def options(fusion: str, task: str) -> dict[str, Any]:
    """What a fusion has: cross-attention in each layer, of features as large as the encoder's norm leaves them."""
    if fusion != "cross_attention":
        return {"fusion": forge_vlm.FusionConfig(fusion)}
    cross = forge_vlm.CrossAttentionConfig(every_n_layers=1, sees=SEES.get(task, "group"))
    return {
        "fusion": forge_vlm.FusionConfig(fusion, cross_attention=cross),
        "adapter": forge_vlm.AdapterConfig("linear"),
    }


def build(fusion: str, task: str) -> forge_vlm.VLM:
    """A small decoder with a small encoder: about 0.2 M parameters, 0.4 M with cross-attention or more weights by modality."""
    vit = ViTConfig(image_size=32, patch_size=8, dim=64, num_layers=2, num_heads=4)
    return forge_vlm.VLM(
        forge_vlm.VLMConfig(
            vocab_size=len(VOCABULARY),
            dim=64,
            num_layers=3,
            num_heads=4,
            max_seq_len=128,
            vision=forge_vlm.VisionConfig(vit=vit),
            modalities={"image": forge_vlm.ModalityConfig(first_id=IMAGE)},
            **options(fusion, task),
        )
    )


def learn(
    fusion: str, task: str, steps: int | None = None, held_out: int = 360
) -> dict[str, object]:
    """Train a model on a task; shares of right answers on held-out samples, and what it cost."""
    began = time.process_time()
    rng = np.random.default_rng(0)
    model, steps = (
        build(fusion, task),
        int(STEPS[task] * LONGER.get(fusion, 1.0)) if steps is None else steps,
    )
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.01))
    known = digits(train=True) if task == "digits" else []
    for step in range(steps):
        samples = _draw(task, rng, known, 64)
        rows = batch_of(samples, PER_IMAGE[fusion])
        set_lr(optimizer, 2e-3 * min(1.0, (step + 1) / 50, (steps - step) / (0.4 * steps)))
        logits = model(rows.tokens, document_ids=rows.document_ids, images=rows.images)
        cross_entropy(logits, rows.labels).mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = time.process_time() - began
    test = digits(train=False) if task == "digits" else _draw(task, rng, [], held_out)
    blank = [s._replace(images=np.zeros_like(s.images)) for s in test]
    right, ended = answered(model, test)
    found: dict[str, object] = {
        "fusion": fusion,
        "task": task,
        "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "held_out": len(test),
        "right": right,
        "ended": ended,
        "right_blank": answered(model, blank)[0],
        "right_shuffled": answered(model, shuffled(test, task))[0],
        "chance": round(CHANCE[task], 3),
        "processor_seconds": round(trained, 1),
    }
    return found


def shuffled(samples: Sequence[Sample], task: str) -> list[Sample]:
    """The same questions with pictures of others; of motion with its own frames in another order."""
    rng = np.random.default_rng(1)
    if task == "motion":
        return [s._replace(images=rng.permutation(s.images)) for s in samples]
    order = rng.permutation(len(samples))
    return [s._replace(images=samples[i].images) for s, i in zip(samples, order)]


def answered(model: forge_vlm.VLM, samples: Sequence[Sample]) -> tuple[float, float]:
    """Shares of samples whose generated answer is right, and that were ended by the end token."""
    right = ended = 0
    for first in range(0, len(samples), 60):
        part = samples[first : first + 60]
        images = torch.from_numpy(np.concatenate([s.images for s in part]))
        prompts = [expanded(s.prompt, PER_IMAGE[model.config.fusion.name]) for s in part]
        new = generate(
            model, prompts, 3, SamplingConfig(temperature=0.0), EOS, extras={"images": images}
        )
        for sample, row in zip(part, new.tolist()):
            right += row[: len(sample.answer)] == sample.answer
            ended += EOS in row
    return round(right / len(samples), 4), round(ended / len(samples), 4)


def _draw(task: str, rng: np.random.Generator, known: list[Sample], count: int) -> list[Sample]:
    if known:
        return [known[i] for i in rng.integers(0, len(known), count)]
    return [DRAWN[task](rng) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fusions", nargs="*", choices=FUSIONS, default=list(FUSIONS))
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--write", action="store_true", help="keep the rows, and make the page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # figures are processor seconds of one
    kept = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    for fusion in arguments.fusions:
        for task in arguments.tasks:
            row = learn(fusion, task)
            print(json.dumps(row), flush=True)
            kept = [r for r in kept if (r["fusion"], r["task"]) != (fusion, task)] + [row]
            if arguments.write:
                write(kept)


def write(rows: list[dict[str, object]]) -> None:
    """The rows as JSON, and the page that is made from them."""
    rows.sort(key=lambda r: (FUSIONS.index(str(r["fusion"])), TASKS.index(str(r["task"]))))
    found = {"torch": torch.__version__, "rows": rows}
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text("\n".join(_page(rows)) + "\n")


def _page(rows: Sequence[dict[str, object]]) -> Iterator[str]:
    yield "# What the fusions learn to see"
    yield ""
    yield "Share of right answers, generated from the picture and the question (`python -m tests.vlm.learn --write`). A model"
    yield "has a width of 64, three blocks, and an encoder of two; it begins from random weights. Controls: the same"
    yield "questions with blank pictures, and with those of another sample (motion: its own frames shuffled). Both must fall"
    yield "to chance, the share of who knows the questions alone. The digits are those of scikit-learn, 360 held out."
    yield ""
    yield 'Cross-attention sees pictures side by side as one set without order (`sees = "group"`): of a motion it can tell the'
    yield 'axis, which is half of the answers, whether frames are shuffled or not. That task has `sees = "last"`: the place of each'
    yield "frame in the row sees that frame, and attention over the row knows their order. Frames in any order show the axis of"
    yield "a motion, so that 50 % of the answers to shuffled ones can be right without it."
    yield ""
    yield "| fusion | task | right | blank | shuffled | chance | ended by its end token | steps of 64 | processor seconds |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for r in rows:
        shares = " | ".join(
            f"{r[k]:.1%}" for k in ("right", "right_blank", "right_shuffled", "chance", "ended")
        )
        yield f"| {r['fusion']} | {r['task']} | {shares} | {r['steps']} | {r['processor_seconds']} |"


if __name__ == "__main__":
    main()

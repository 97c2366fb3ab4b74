"""How much work do towers and groups of experts need for the loss of a dense decoder, on text and discrete image tokens?

    python -m tests.vlm.matched_loss [--steps 400] [--seeds 0 1 2 3 4 5] [--write]

Rows are a digit of scikit-learn as 64 tokens of 16 greys and its name, either one first. All models have the same FLOPs per
token, but for routers; data, order and seeds are the same. The loss to reach is fixed first, by dense models of other seeds.
Prints a JSON line for each model and seed; --write keeps them in docs/data/vlm-matched-loss.json and makes the page from it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge_core import OptimizerConfig, build_optimizer, cross_entropy, initialize
from forge_vlm import VLM, FusionConfig, ModalityConfig, SequencePlan, VisionConfig, VLMConfig
from forge_vlm.fusion import MoMaConfig
from forge_vlm.modalities import modality_losses, numbers_by_id, trained_modalities

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "docs/data/vlm-matched-loss.json"
PAGE = ROOT / "docs/vlm-matched-loss.md"
GREYS, BEGIN, END, FIRST = 16, 1, 2, 32
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HIDDEN, ROWS, EVERY = 160, 32, 10
#: Evaluations of which a loss is the mean; seeds of the dense models that fix the loss to reach; how far others may go on.
MEAN, TARGETS, FURTHER = 5, (100, 101, 102, 103), 1.5
DENSE = "joint_decoder"
MODELS: dict[str, FusionConfig] = {
    "joint_decoder": FusionConfig("joint_decoder"),
    "mixture_of_transformers": FusionConfig("mixture_of_transformers"),
    # two experts of half the width meet each token: the FLOPs of the dense feed-forward
    "moma": FusionConfig("moma", moma=MoMaConfig(num_experts=4, top_k=2, hidden_dim=HIDDEN // 2)),
}
LEARNT = ("text", "image")


def corpus() -> tuple[Tensor, Tensor]:
    """Rows (N, S) to learn from, and held out: letters are 3 to 28, and rows are filled with 0."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    rows = []
    for i in order:
        picture = [BEGIN, *(FIRST + int(min(v, GREYS - 1)) for v in digits.images[i].flat), END]
        name = [3 + ord(letter) - ord("a") for letter in NAMES[digits.target[i]]]
        row = [*name, *picture] if i % 2 else [*picture, *name, END]
        rows.append(row + [0] * (76 - len(row)))
    found = torch.tensor(rows)
    return found[:1437], found[1437:]


def batch(model: VLM, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and document ids (B, S)."""
    ids = torch.where(rows == 0, -1, 0)
    modalities = model.config.modalities
    plan = SequencePlan.of(rows, ids, numbers_by_id(modalities))
    return rows, plan.labels(rows, trained_modalities(modalities)), ids


def curve(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Held-out losses of both modalities along a run, and forward FLOPs of a token."""
    config = VLMConfig(
        **{"vocab_size": FIRST + GREYS, "dim": 64, "num_layers": 2, "num_heads": 4},
        **{"hidden_dim": HIDDEN, "max_seq_len": 76},
        vision=VisionConfig("none"),
        modalities={"image": ModalityConfig(FIRST, GREYS, discrete=True)},
        fusion=MODELS[name],
    )
    model, (train, held) = VLM(config), corpus()
    initialize(model, seed)
    optimizer: Any = build_optimizer(model, OptimizerConfig(lr=3e-3, weight_decay=0.1))
    order = torch.Generator().manual_seed(seed)
    found: dict[str, list[float]] = {m: [] for m in LEARNT}
    began = time.process_time()
    for step in range(steps + 1):
        if step % EVERY == 0:
            for modality, loss in held_out(model, held[:128]).items():
                found[modality].append(loss)
        if step == steps:
            break
        chosen = torch.randint(len(train), (ROWS,), generator=order)
        tokens, labels, ids = batch(model, train[chosen])
        cross_entropy(model(tokens, document_ids=ids), labels).mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {
        **{"model": name, "seed": seed, "steps": steps},
        "flops_per_token": model.flops_per_token(76),
        "parameters": sum(p.numel() for p in model.parameters()),
        **{f"loss.{m}": [round(v, 4) for v in found[m]] for m in LEARNT},
        "processor_seconds": round(time.process_time() - began, 1),
    }


@torch.no_grad()
def held_out(model: VLM, rows: Tensor) -> dict[str, float]:
    """Mean loss of the labels of each modality."""
    tokens, labels, ids = batch(model, rows)
    model.eval()
    loss = cross_entropy(model(tokens, document_ids=ids), labels)
    model.train()
    parts = modality_losses(loss.token_losses, labels, model.config.modalities)
    return {m: float(parts[m].sum / parts[m].count) for m in LEARNT}


def smooth(losses: Sequence[float]) -> list[float]:
    """The mean of each evaluation and the four before it."""
    return [statistics.fmean(losses[i + 1 - MEAN : i + 1]) for i in range(MEAN - 1, len(losses))]


def matched(row: dict[str, Any], targets: Sequence[dict[str, Any]], modality: str) -> float:
    """FLOPs until the mean of the last losses of the dense `targets`, as a share of those that these had; infinite where it is
    not reached."""
    wanted = statistics.fmean(smooth(t[f"loss.{modality}"])[-1] for t in targets)
    for number, loss in enumerate(smooth(row[f"loss.{modality}"]), MEAN - 1):
        if loss <= wanted:
            share: float = number * EVERY / targets[0]["steps"]
            return share * row["flops_per_token"] / targets[0]["flops_per_token"]
    return math.inf


def page(targets: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The page of the rows."""
    seeds, steps = len({r["seed"] for r in rows}), targets[0]["steps"]
    yield "# Work to a matched loss"
    yield ""
    yield "Mixture of transformers (arXiv 2411.04996) and MoMa (arXiv 2407.21770) report how many FLOPs they need for the loss of a"
    yield "dense model on text and discrete image tokens. The same question, small: digits of scikit-learn as 64 tokens of 16 greys,"
    yield f"with their names, {ROWS} rows a step, width 64, two layers, held-out losses every {EVERY} steps, of which a loss is the mean"
    yield f"of {MEAN} (`python -m tests.vlm.matched_loss --write`)."
    yield ""
    yield f"The loss to reach was fixed first: that of {len(targets)} dense models of other seeds after {steps} steps. Shares are FLOPs to it over the"
    yield f"FLOPs that those had; runs went on for {rows[0]['steps']} steps. The dense model's own shares say how far seeds scatter: a model takes less"
    yield f"work if all its {seeds} seeds are below all of the dense model's, and that holds for: {', '.join(_less(targets, rows)) or 'none'}."
    yield ""
    yield "MoMa lets tokens choose experts here, where the paper lets experts choose, with auxiliary routers; equal FLOPs are not"
    yield "equal parameters. Models of this size and set say nothing of large ones."
    yield ""
    yield "| model | FLOPs of a token | parameters | FLOPs to the loss of text: median | of each seed | to that of images: median | of each seed |"
    yield "|---|---|---|---|---|---|---|"
    for name in MODELS:
        one = next(r for r in rows if r["model"] == name)
        flops = f"{one['flops_per_token'] / targets[0]['flops_per_token']:.2f}"
        told = []
        for modality in LEARNT:
            shares = _shares(targets, rows, name, modality)
            told += [_said(statistics.median(shares)), ", ".join(map(_said, shares))]
        yield f"| {name} | {flops} | {one['parameters']:,} | {' | '.join(told)} |"


def _said(share: float) -> str:
    return "not reached" if share == math.inf else f"{share:.0%}"


def _shares(targets: Any, rows: Any, name: str, modality: str) -> list[float]:
    """Of each seed of a model."""
    return [matched(r, targets, modality) for r in rows if r["model"] == name]


def _less(targets: Any, rows: Any) -> Iterator[str]:
    """Models and modalities whose worst seed took less work than the dense model's best."""
    for name in [n for n in MODELS if n != DENSE]:
        for modality in LEARNT:
            own, dense = (_shares(targets, rows, n, modality) for n in (name, DENSE))
            if max(own) < min(dense):
                yield f"{name} for {modality} ({max(own):.0%} at most against {min(dense):.0%} at least)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(6)))
    parser.add_argument("--write", action="store_true", help="keep the rows, and make the page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    longer = int(arguments.steps * FURTHER)
    targets = [_told(DENSE, seed, arguments.steps) for seed in TARGETS]
    rows = [_told(name, seed, longer) for name in MODELS for seed in arguments.seeds]
    if arguments.write:
        kept = {"torch": torch.__version__, "targets": targets, "rows": rows}
        RESULT.write_text(json.dumps(kept) + "\n")
        PAGE.write_text("\n".join(page(targets, rows)) + "\n")


def _told(name: str, seed: int, steps: int) -> dict[str, Any]:
    row = curve(name, seed, steps)
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()

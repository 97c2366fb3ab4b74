"""How much work do towers and groups of experts need for the loss of a dense decoder, on text and discrete image tokens?

    python -m tests.vlm.matched_loss [--steps 400] [--seeds 0 1] [--write]

Rows are a digit of scikit-learn as 64 tokens of 16 greys and its name, either one first. All models have the same FLOPs per
token, but for routers; data, order and seeds are the same. Prints a JSON line for each model and seed; --write keeps them in
docs/vlm-matched-loss.json and makes the page from it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge_core import OptimizerConfig, build_optimizer, cross_entropy, initialise
from forge_vlm import VLM, FusionConfig, ModalityConfig, SequencePlan, VisionConfig, VLMConfig
from forge_vlm.fusion import MoMaConfig
from forge_vlm.loss import modality_losses
from forge_vlm.modalities import learnt, numbers_by_id

RESULT = Path(__file__).parents[2] / "docs" / "vlm-matched-loss.json"
GREYS, BEGIN, END, FIRST = 16, 1, 2, 32
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HIDDEN, ROWS, EVERY = 160, 32, 10
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
    return rows, plan.labels(rows, learnt(modalities)), ids


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
    initialise(model, seed)
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


def matched(row: dict[str, Any], dense: dict[str, Any], modality: str) -> float | None:
    """FLOPs until the dense model's last loss, as a share of those that it had; None where it is not reached."""
    wanted = dense[f"loss.{modality}"][-1]
    for number, loss in enumerate(row[f"loss.{modality}"]):
        if loss <= wanted:
            share: float = number * EVERY / row["steps"]
            return share * row["flops_per_token"] / dense["flops_per_token"]
    return None


def page(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The page of the rows."""
    yield "# Work to a matched loss"
    yield ""
    yield "Mixture of transformers (arXiv 2411.04996) and MoMa (arXiv 2407.21770) report how many FLOPs they need for the loss of a"
    yield "dense model on text and discrete image tokens. The same question, small: digits of scikit-learn as 64 tokens of 16 greys,"
    yield f"with their names, {rows[0]['steps']} steps of {ROWS} rows, width 64, two layers, held-out losses every {EVERY} steps"
    yield "(`python -m tests.vlm.matched_loss --write`). A share below 100 % means less work than the dense model had for its last"
    yield "loss. MoMa lets tokens choose experts here, where the paper lets experts choose, with auxiliary routers; equal FLOPs are not"
    yield f"equal parameters. {len({r['seed'] for r in rows})} seeds do not say how far losses scatter, and models of this size and set"
    yield "say nothing of large ones."
    yield ""
    yield f"Less work in every seed: {', '.join(_less(rows)) or 'none'}."
    yield ""
    yield "| model | seed | FLOPs of a token | parameters | loss of text | loss of images | FLOPs to the dense loss of text | of images |"
    yield "|---|---|---|---|---|---|---|---|"
    dense = _dense(rows)
    for r in rows:
        base = dense[r["seed"]]
        shares = [matched(r, base, m) for m in LEARNT]
        said = ["not reached" if s is None else f"{s:.0%}" for s in shares]
        last = [f"{r[f'loss.{m}'][-1]:.3f}" for m in LEARNT]
        flops = f"{r['flops_per_token'] / base['flops_per_token']:.2f}"
        yield f"| {r['model']} | {r['seed']} | {flops} | {r['parameters']:,} | {' | '.join(last)} | {' | '.join(said)} |"


def _dense(rows: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The dense model's row of each seed."""
    return {r["seed"]: r for r in rows if r["model"] == "joint_decoder"}


def _less(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Models and modalities whose loss took less work than the dense model's in every seed, with the range of shares."""
    dense = _dense(rows)
    for name in [n for n in MODELS if n != "joint_decoder"]:
        for modality in LEARNT:
            own = [matched(r, dense[r["seed"]], modality) for r in rows if r["model"] == name]
            shares = [share for share in own if share is not None]
            if len(shares) == len(own) and max(shares) < 1:
                yield f"{name} for {modality} ({min(shares):.0%} to {max(shares):.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--write", action="store_true", help="keep the rows, and make the page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in MODELS:
        for seed in arguments.seeds:
            rows.append(curve(name, seed, arguments.steps))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.write:
        RESULT.write_text(json.dumps({"torch": torch.__version__, "rows": rows}) + "\n")
        RESULT.with_suffix(".md").write_text("\n".join(page(rows)) + "\n")


if __name__ == "__main__":
    main()

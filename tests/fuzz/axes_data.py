"""Axes of data, loss and length."""

from __future__ import annotations

from typing import Any

from tests.fuzz.job import NO, NONE, Axis, Job, table


def _phase(**keys: Any) -> Any:
    def found(job: Job) -> dict[str, Any]:
        start = {"start_instance": job.sizes["phase"]}
        if job.pick("phase start", (True, False)):
            start = {"start_tokens": job.sizes["phase"] * job.sizes["seq_len"] - 1}
        own = {key: value(job) if callable(value) else value for key, value in keys.items()}
        return table("data.phases.later", **start, **own)

    return found


def _length_in_tokens(job: Job) -> dict[str, Any]:
    tokens = job.sizes["steps"] * job.sizes["global_batch"] * job.sizes["seq_len"]
    return {"train.steps": None, "train.tokens": tokens - job.pick("tokens", (0, 1, 7))}


def _loss(name: str, **terms: float) -> dict[str, Any]:
    return {"train.loss": name, **table(f"train.{name}", **terms)}


_TERMS = {"z_loss": 0.01, "label_smoothing": 0.1}
DATA = {
    # what the files of `case.py` are; conversations have tokens without labels, and weighted ones weights per label
    "source": Axis(
        "data",
        {
            name: NO
            for name in (
                "npy",
                "nanogpt",
                "tokens",
                "chat",
                "chat, last",
                "chat, all",
                "chat, truncated",
                "chat, skipped",
                "chat, weighted",
            )
        },
        {"npy": 6.0, "nanogpt": 1.5},
    ),
    "sources": Axis(
        "data",
        {
            "one": NO,
            "weighted": {"data.sources.a.weight": 3.0, "data.sources.b.weight": 1.5},
            "by size": NO,
            "temperature": {"data.temperature": 2.0},
            "ending": {
                **table("data.sources.a", weight=1.0),
                **table("data.sources.b", weight=2.0, max_epochs=1),
                **table("data.sources.c", weight=0.5, max_epochs=2),
            },
        },
        {"one": 4.0},
    ),
    "phases": Axis(
        "data",
        {
            **NONE,
            "weights": _phase(weights={"a": 1.0, "b": 2.0}),
            "rates": _phase(lr_multiplier=0.3),
            "rows": _phase(seq_len=lambda job: job.sizes["later_seq_len"]),
            "batches": _phase(global_batch=lambda job: job.sizes["later_batch"]),
        },
        {"none": 4.0},
    ),
    "packing": Axis(
        "data",
        {
            "concatenate": NO,
            "first_fit": {"data.packing.name": "first_fit"},
            "best_fit": {"data.packing.name": "best_fit"},
            "small windows": {"data.packing.name": "best_fit", "data.packing.best_fit.window": 8},
        },
        {"concatenate": 2.0},
    ),
    # rows of a source for the whole run, or few, so that epochs end in the run and last rows are padded
    "epochs": Axis("data", {"one": NO, "several": NO}),
    "reading": Axis(
        "data",
        {"at once": NO, "ahead": {"data.prefetch": 2}, "worker": {"data.num_workers": 1}},
        {"at once": 12.0, "ahead": 3.0},
    ),
    "validation": Axis(
        "data",
        {
            **NONE,
            "one": {"eval.every_steps": 2},
            "at start": {"eval.every_steps": 3, "eval.at_start": True},
            "sets": {"eval.every_steps": 2},
        },
        {"none": 2.0},
    ),
}
TRAINING = {
    "micro-batches": Axis(
        "training",
        {**NONE, "two": NO, "single rows": NO, "uneven": NO},
    ),
    "loss": Axis(
        "training",
        {
            "cross_entropy": NO,
            "cross_entropy, terms": _loss("cross_entropy", **_TERMS),
            "cross_entropy, z-loss": _loss("cross_entropy", z_loss=0.03),
            "fused": _loss("fused_cross_entropy"),
            "fused, terms": _loss("fused_cross_entropy", **_TERMS),
        },
        {"cross_entropy": 2.0},
    ),
    "clip": Axis(
        "training",
        {
            "usual": NO,
            "tight": {"train.max_grad_norm": 0.05},
            "never": {"train.max_grad_norm": "none"},
        },
    ),
    "length": Axis("training", {"steps": NO, "tokens": _length_in_tokens}, {"steps": 3.0}),
}

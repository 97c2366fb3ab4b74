"""Axes of optimizers, schedules and adapters."""

from __future__ import annotations

from typing import Any

from tests.fuzz.job import NO, NONE, Axis, Job, table


def _optimizer(name: str, lr: float, **keys: Any) -> dict[str, Any]:
    own = {} if name == "lion" else {"eps": 1e-4}
    return table("optimizer", name=name, lr=lr, **own, **keys)


def _muon(**keys: Any) -> Any:
    keys = {"ns_dtype": "fp32", **keys}
    lr = 0.02 if keys.get("adjust") == "original" else 0.01
    return {**_optimizer("muon", lr), **table("optimizer.muon", **keys)}


def _decay(job: Job) -> dict[str, Any]:
    groups = {
        "embedding": {"patterns": ["embedding.*"], "weight_decay": 0.3},
        "norms": {"patterns": ["*norm.weight"], "weight_decay": 0.02, "lr_multiplier": 2.0},
    }
    return _tables(groups)


def _tables(groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, keys in groups.items():
        found |= table(f"optimizer.groups.{name}", **keys)
    return found


def _rates(first: float, head: float) -> dict[str, Any]:
    groups = {
        "first": {"patterns": ["embedding.*", "layers.0.*"], "lr_multiplier": first},
        "head": {"patterns": ["norm.weight", "lm_head.*"], "lr_multiplier": head},
    }
    return _tables(groups)


def _stage(**multipliers: float) -> Any:
    def keys(job: Job) -> dict[str, Any]:
        start = {"start_step": 1 + job.sizes["steps"] // 2}
        return table("train.stages.later", **start, lr_multipliers=multipliers)

    return keys


def _muon_groups(job: Job) -> dict[str, Any]:
    groups = {
        "attention": {"patterns": ["layers.*.mixer.*"], "muon": False},
        "embedding": {"patterns": ["embedding.weight"], "muon": True, "lr_multiplier": 0.5},
    }
    return _tables(groups)


def _lora(job: Job, **keys: Any) -> dict[str, Any]:
    rank = {"rank": job.pick("rank", (2, 3)), "alpha": 6.0, "base_dtype": "fp32"}
    return table("lora", **{**rank, **keys})


_SCHEDULES = ("constant", "cosine", "linear", "rex", "inverse_sqrt", "none")
OPTIMIZER = {
    "optimizer": Axis(
        "optimizer",
        {
            "adamw": _optimizer("adamw", 5e-3),
            "adamw, betas": _optimizer("adamw", 3e-3, betas=[0.7, 0.9], weight_decay=0.0),
            "muon": _muon(),
            "muon, original": _muon(adjust="original", nesterov=False, adamw_lr_multiplier=0.5),
            "muon, bf16": _muon(ns_dtype="bf16"),
            "lion": _optimizer("lion", 1e-3),
            "schedule_free_adamw": _optimizer("schedule_free_adamw", 5e-3),
            "schedule_free_adamw, r": {
                **_optimizer("schedule_free_adamw", 5e-3),
                **table("optimizer.schedule_free", r=1.0, weight_lr_power=1.0),
            },
        },
        {
            "adamw": 5.0,
            "muon, bf16": 0.5,
            "schedule_free_adamw": 0.7,
            "schedule_free_adamw, r": 0.7,
        },
    ),
    "moments": Axis(
        "optimizer", {"fp32": NO, "bf16": {"optimizer.state_dtype": "bf16"}}, {"fp32": 14.0}
    ),
    "schedule": Axis(
        "optimizer",
        {name: {"schedule.name": name} for name in _SCHEDULES}
        | {
            f"wsd, {decay}": table(
                "schedule", name="wsd", **{"wsd.decay": decay, "wsd.decay_fraction": 0.5}
            )
            for decay in ("sqrt", "linear", "cosine")
        },
    ),
    "warm-up": Axis(
        "optimizer",
        {"no": NO, "yes": lambda job: {"schedule.warmup_steps": job.sizes["warm-up"]}},
    ),
    "groups": Axis(
        "optimizer",
        {
            **NONE,
            "rates": _rates(0.5, 2.0),
            "decay": _decay,
            "frozen": _rates(0.0, 1.5),
            "muon": _muon_groups,
        },
        {"none": 3.0, "muon": 0.5},
    ),
    "stages": Axis(
        "optimizer",
        {**NONE, "thaw": _stage(first=0.7), "freeze": _stage(first=1.0, head=0.0)},
    ),
    "ema": Axis("optimizer", {"no": NO, "yes": {"optimizer.ema.decay": 0.6}}, {"no": 4.0}),
    "lora": Axis(
        "optimizer",
        {
            **NONE,
            "attention": _lora,
            "all projections": lambda job: _lora(job, patterns=["*_proj", "!*.kv_b_proj"]),
            "with norms": lambda job: _lora(job, whole=["*norm.weight"]),
            "bf16 base": lambda job: _lora(job, base_dtype="bf16"),
        },
        {"none": 16.0},
    ),
}

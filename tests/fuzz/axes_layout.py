"""Axes of layouts, of what a rank computes, and of what happens to a run."""

from __future__ import annotations

from typing import Any

from tests.fuzz.job import NO, NONE, Axis, table

from forge_parallel.config import SCHEDULES

_WHOLE = {"parallel.tp": 2, "parallel.sequence_parallel": False}
_RING = {"parallel.cp_exchange": "ring"}


def _copies(copies: int, shards: int = 1) -> dict[str, Any]:
    return {"parallel.dp_replicate": copies, "parallel.dp_shard": shards}


def _pipeline(schedule: str, ranks: int = 2) -> dict[str, Any]:
    return {"parallel.pp": ranks, "parallel.pp_schedule": schedule}


LAYOUT = {
    "data ranks": Axis(
        "layout",
        {
            **{"1": NO},
            **{str(n): {"parallel.dp_shard": n} for n in (2, 3, 4, 5, 6)},
            "2 copies": _copies(2),
            "3 copies": _copies(3),
            "2 x 2": _copies(2, 2),
            "2 x 3": _copies(2, 3),
            "3 x 2": _copies(3, 2),
        },
        {"1": 6.0, "2": 5.0, "3": 2.0, "6": 0.5, "2 x 3": 0.5, "3 x 2": 0.5, "5": 0.8},
    ),
    "tp": Axis(
        "layout",
        {"1": NO, "2": {"parallel.tp": 2}, "2, whole sequences": _WHOLE, "3": {"parallel.tp": 3}},
        {"1": 9.0, "3": 0.5},
    ),
    "cp": Axis(
        "layout",
        {
            "1": NO,
            "2": {"parallel.cp": 2},
            "2, ring": {"parallel.cp": 2, **_RING},
            "3": {"parallel.cp": 3},
            "3, ring": {"parallel.cp": 3, **_RING},
        },
        {"1": 14.0, "3": 0.5, "3, ring": 0.5},
    ),
    "pp": Axis(
        "layout",
        {
            "1": NO,
            **{schedule: _pipeline(schedule) for schedule in SCHEDULES},
            "1f1b, 3 stages": _pipeline("1f1b", 3),
        },
        {"1": 18.0, "1f1b, 3 stages": 0.5},
    ),
    "ep": Axis(
        "layout",
        {"1": NO, **{str(n): {"parallel.ep": n} for n in (2, 3, 4)}},
        {"2": 2.0},
    ),
}
_BF16 = {"parallel.precision": "bf16", "optimizer.lr": 1e-3}
COMPUTATION = {
    "recompute": Axis(
        "computation",
        {
            **NONE,
            "full": {"parallel.recompute": "full"},
            "selective": {"parallel.recompute": "selective"},
            "every second": table("parallel", recompute="full", recompute_every=2),
        },
        {"none": 4.0},
    ),
    # by the backend aot_eager, that of most tests of compiled blocks, or by the compiler that users have
    "compile": Axis(
        "computation",
        {"no": NO, "aot_eager": {"parallel.compile": True}, "inductor": {"parallel.compile": True}},
        {"no": 14.0, "inductor": 0.4},
    ),
    # at a rate at which rounding does not lead to another run
    "precision": Axis(
        "computation",
        {
            "fp32": NO,
            "bf16": {**_BF16},
            "bf16, reduced": {**_BF16, "parallel.reduce_dtype": "bf16"},
            "bf16 weights": {**_BF16, "parallel.param_dtype": "bf16"},
        },
        {"fp32": 24.0},
    ),
    "shards": Axis(
        "computation",
        {
            "freed": NO,
            "kept": {"parallel.reshard_after_forward": False},
            "offloaded": {"parallel.cpu_offload": True},
        },
        {"freed": 5.0},
    ),
    "sdpa": Axis(
        "computation",
        {"auto": NO, "flash": {"parallel.sdpa": "flash"}, "math": {"parallel.sdpa": "math"}},
        {"auto": 6.0},
    ),
}


# ---- what happens to the run

_BACK = {"checkpoint.every_steps": 1, "checkpoint.wait": True}
EVENTS = {
    # a signal to one rank, after which the run saves and ends; or the death of one rank, after a checkpoint
    "restart": Axis(
        "events",
        {
            "no": NO,
            "stop": {"checkpoint.every_steps": 0},
            "kill": {"checkpoint.every_steps": 2, "checkpoint.wait": True},
        },
        {"no": 3.0, "kill": 0.7},
    ),
    "after the restart": Axis(
        "events", {"same layout": NO, "other layout": NO, "other world size": NO}
    ),
    # the loss of one step is infinite, or a hundred times itself
    "bad step": Axis(
        "events",
        {
            "no": NO,
            "skipped": table("resilience.nonfinite", action="skip", max_in_a_row=2),
            "rollback": {
                **table("resilience.nonfinite", action="rollback", max_in_a_row=0),
                **_BACK,
            },
            "rollback, batches before": {
                **table("resilience.nonfinite", action="rollback", max_in_a_row=0),
                **_BACK,
                **table("resilience.rollback", batches_before=1, lr_factor=0.5),
            },
            "spike": {
                **table("resilience.spike", action="rollback", window=3, sigma=6.0),
                **_BACK,
            },
        },
        {"no": 16.0},
    ),
}

"""Checkpoints of earlier releases load, bit by bit, and training goes on from them.

`golden/0.1.0` was written by `forge-train run job.toml` when the optimizer was no torch optimizer:
steps 2 and 4 of the same run. It never changes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from forge_ckpt import Store
from forge_testing.runs import fit_alone

GOLDEN = Path(__file__).parent / "golden" / "0.1.0"


def saved(step: str, folder: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of a golden step by name."""
    shutil.copytree(GOLDEN / step, folder / step)
    state = dict.fromkeys(("model", "optimizer", "loader", "progress", "rng"))
    with Store(folder) as store:
        store.load(state)
    found = dict(state["model"])
    for name, slots in state["optimizer"].items():
        found.update({f"{name}.{slot}": slots[slot] for slot in ("exp_avg", "exp_avg_sq")})
        assert slots["step"] == float(step[-1])
    return found


def test_F114_a_checkpoint_of_0_1_0_goes_on(tmp_path: Path) -> None:
    wanted = saved("step-00000004", tmp_path / "wanted")
    shutil.copytree(GOLDEN / "step-00000002", tmp_path / "run/checkpoints/step-00000002")
    done = fit_alone(GOLDEN / "job.toml", **{"run.dir": str(tmp_path / "run")})
    assert (done.code, done.step) == (0, 4)
    assert done.weights.keys() == wanted.keys()
    for name, value in wanted.items():  # other processors round sums in another order
        assert (done.weights[name] - value).abs().max() <= 1e-5 * value.abs().max(), name

"""Layouts, and the runs of a pair: saved in one, loaded and trained on in the other."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from forge_testing import run_on_ranks
from forge_testing.jobs import MIXTURE
from forge_testing.runs import fit, make_job
from forge_train import Callback, Trainer, read_run

SAVED, LAST = 3, 6  # the step that is loaded, the last one that is compared
BOUND = 1e-5  # fp32, of losses, weights and moments; what is loaded has the same bits
# A mixture in every layout: experts, a bias that is a buffer, heads and layers for tp 2 and pp 2.
SIZES = {
    "model.num_layers": 4,
    "model.dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.qk_norm": True,
    "optimizer.lr": 1e-3,
    "train.steps": LAST,
    "train.micro_batch": 3,
    "checkpoint.every_steps": SAVED,
    "eval.every_steps": 0,
    "eval.sequences": 4,
    "sample.max_new_tokens": 0,
    "metrics.console": "off",
}
# name -> (ranks, keys of [parallel])
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "fsdp2": (2, {}),
    "fsdp4": (4, {}),
    "hsdp2x2": (4, {"dp_replicate": 2}),
    "tp2": (2, {"tp": 2}),
    "tp2-fsdp2": (4, {"tp": 2}),
    "cp2-fsdp2": (4, {"cp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2-fsdp2": (4, {"pp": 2, "pp_schedule": "interleaved_1f1b"}),
    "pp2-tp2": (4, {"pp": 2, "tp": 2}),
    "ep2-fsdp2": (4, {"ep": 2}),
    "pp2-ep2": (4, {"pp": 2, "ep": 2}),
}
PAIRS = [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b]
RING = list(zip(LAYOUTS, [*list(LAYOUTS)[1:], *list(LAYOUTS)[:1]]))
Tensors = dict[str, torch.Tensor]


@dataclass
class Run:
    """Whole tensors when the saved step was reached or loaded, and at the end; losses by step."""

    saved: Tensors
    end: Tensors
    losses: dict[int, float]
    folder: Path
    seconds: float = 0.0


@dataclass
class Measured:
    """The worst of each quantity; `contents` counts tensors that are not the same bits after the load."""

    first: str
    then: str
    seed: int
    error: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.first} -> {self.then}"

    @property
    def red(self) -> list[str]:
        return [name for name, value in self.error.items() if not value <= bounds()[name]]


def bounds() -> dict[str, float]:
    return {"contents": 0, "loss": BOUND, "weights": BOUND, "moments": BOUND}


class _Watch(Callback):
    """Keeps the whole state of the saved step, computed or loaded."""

    saved: Tensors

    def on_start(self, trainer: Trainer) -> None:
        if trainer.progress.step == SAVED:
            _Watch.saved = _whole(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == SAVED:
            _Watch.saved = _whole(trainer)

    def on_end(self, trainer: Trainer) -> None:
        _Watch.end = _whole(trainer)


def _whole(trainer: Trainer) -> Tensors:
    """Parameters, buffers (biases of experts) and every slot of the optimizer; collective."""
    found: dict[str, Any] = {**trainer.model.state_dict()}
    for name, slots in trainer.optimizer.named_state().items():
        found.update({f"{name} {slot}": value for slot, value in slots.items()})
    return {name: _plain(value).detach().clone() for name, value in found.items()}


def _plain(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.tensor(float(value), dtype=torch.float64)
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[operator]


def train(job: Path, overrides: dict[str, Any]) -> tuple[int, tuple[str, ...], Tensors, Tensors]:
    """One rank: exit code, problems, the state at the saved step, the state at the end."""
    _Watch.saved = _Watch.end = {}
    fitted = fit(job, dict(overrides), _Watch)
    return int(fitted.code), fitted.problems, _Watch.saved, _Watch.end


def run(folder: Path, layout: str, seed: int) -> Run:
    """Train to the last step, from the newest checkpoint in `folder` if there is one."""
    job = folder / "job.toml"
    if not job.exists():
        make_job(folder, MIXTURE)
    world, keys = LAYOUTS[layout]
    overrides = {**SIZES, "run.seed": seed, **{f"parallel.{k}": v for k, v in keys.items()}}
    begun = time.perf_counter()
    ranks = run_on_ranks(world, train, job, overrides, timeout=120)
    seconds = time.perf_counter() - begun
    assert all(code == 0 for code, *_ in ranks), [problems for _, problems, *_ in ranks]
    rows = read_run(folder / "run").metrics
    losses = {step: loss for step, loss in zip(rows["step"], rows["loss"]) if step > SAVED}
    saved, end = (_together(rank[place] for rank in ranks) for place in (2, 3))
    return Run(saved, end, losses, folder, seconds)


def _together(ranks: Iterable[Tensors]) -> Tensors:
    """Tensors of all ranks by name; where several have one, the same bits."""
    found: Tensors = {}
    for tensors in ranks:
        for name, value in tensors.items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


def pair(folder: Path, first: Run, names: tuple[str, str], seed: int) -> Measured:
    """Load what `first` saved in another layout, and train on. `first` is the run that was not moved."""
    step = f"step-{SAVED:08d}"
    checkpoints = folder / "run/checkpoints"
    shutil.copytree(first.folder / "run/checkpoints" / step, checkpoints / step)
    found = run(folder, names[1], seed)
    assert found.losses.keys() == first.losses.keys() == set(range(SAVED + 1, LAST + 1))
    assert found.end.keys() == first.end.keys()
    differ = [n for n in found.saved.keys() | first.saved.keys() if not _same(found, first, n)]
    loss = max(abs(v - first.losses[n]) / abs(first.losses[n]) for n, v in found.losses.items())
    errors = {name: _error(found.end[name], value) for name, value in first.end.items()}
    moments = [error for name, error in errors.items() if " " in name]
    weights = [error for name, error in errors.items() if " " not in name]
    error = {
        "contents": len(differ),
        "loss": loss,
        "weights": max(weights),
        "moments": max(moments),
    }
    return Measured(*names, seed, error, found.seconds)


def _same(a: Run, b: Run, name: str) -> bool:
    first, second = a.saved.get(name), b.saved.get(name)
    return first is not None and second is not None and torch.equal(first, second)


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """max|a - b| / max|b|; tensors of zeros must be zeros."""
    difference = float((got - wanted).abs().max())
    return difference / float(wanted.abs().max()) if difference else 0.0

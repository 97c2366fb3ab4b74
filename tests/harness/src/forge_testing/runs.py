"""Whole runs in the ranks of the pool, and what they must have in common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from forge_ckpt import read_tensors
from forge_parallel import end_process_group
from forge_testing.devices import device
from forge_testing.jobs import write_job
from forge_testing.ranks import run_on_ranks
from forge_testing.references import once
from forge_train import Callback, Trainer, load_job, read_run
from forge_train.errors import JobError


class Fitted(NamedTuple):
    code: int
    step: int
    problems: tuple[str, ...]
    weights: dict[str, torch.Tensor]


def make_job(folder: Path, extra: str = "") -> Path:
    """The tiny job with a batch that 1, 2, 3 and 4 ranks divide, and with AdamW's eps at 1e-4: with
    1e-8 it makes a full step of the rounding noise in a gradient near zero."""
    folder.mkdir(parents=True, exist_ok=True)
    path = write_job(folder, extra)
    text = path.read_text().replace("global_batch = 4", "global_batch = 12")
    path.write_text(text.replace("lr = 1e-2", "lr = 1e-2\neps = 1e-4"))
    return path


def as_rank(here: int | None = None) -> None:
    """Set the environment that a launcher gives to this rank of the pool, with nodes of `here` ranks, by default one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    here = here or world
    environment = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % here,
                   "LOCAL_WORLD_SIZE": here, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}  # fmt: skip
    os.environ.update({name: str(value) for name, value in environment.items()})


def fit(job: Path, overrides: dict[str, Any], callback: type[Callback] | None = None) -> Fitted:
    """One rank of the pool as `forge-train run` would be it."""
    as_rank(overrides.pop("LOCAL_WORLD_SIZE", None))  # as if a node held so many ranks
    step = 0
    overrides = {"parallel.device": device().type, **overrides}
    try:
        trainer = Trainer(load_job(job, overrides), [callback()] if callback else [])
        try:
            result = trainer.fit()
        finally:
            step = trainer.progress.step
    except JobError as error:
        return Fitted(int(error.exit_code), step, tuple(error.lines), {})
    return Fitted(int(result.exit_code), result.step, (), full(trainer))


def full(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Whole weights and moments, plain."""
    found: dict[str, Any] = dict(trainer.model.named_parameters())
    if hasattr(trainer.optimizer, "named_state"):
        for name, slots in trainer.optimizer.named_state().items():
            tensors = {slot: v for slot, v in slots.items() if isinstance(v, torch.Tensor)}
            found.update({f"{name}.{slot}": v for slot, v in tensors.items()})
    return {
        name: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone()
        for name, v in found.items()
    }


def fit_alone(job: Path, **overrides: Any) -> Fitted:
    """The same run in this process alone, without a process group before and after it."""
    trainer = Trainer(load_job(job, overrides))
    result = trainer.fit()
    found = Fitted(int(result.exit_code), result.step, (), full(trainer))
    end_process_group()  # which weights in 16 bits begin
    return found


def fit_reference(job: Path, **overrides: Any) -> Fitted:
    """`fit_alone`, trained once in a test session for each text of a job and its flags; `job.parent / "run"` is a copy.

    For runs that others are compared with: no callback, patch or file outside the text of the job may change them.
    """
    run = job.parent / "run"
    text = job.read_text().replace(str(run), "RUN")

    def train(folder: Path) -> Fitted:
        copy = folder / "job.toml"
        copy.write_text(text.replace("RUN", str(folder / "run")))
        return fit_alone(copy, **{"metrics.console": "off", **overrides})

    assert "run.dir" not in overrides, "run.dir: not for a reference"
    assert not run.exists(), f"{run} exists: a reference does not continue a run"
    written = job.read_bytes()
    found = once(["fit", text, overrides], train, job.parent)
    job.write_bytes(written)
    return found


def fit_on_ranks(world: int, job: Path, callback: Any = None, **overrides: Any) -> list[Fitted]:
    flat = {key.replace("__", "."): value for key, value in overrides.items()}
    return run_on_ranks(world, fit, job, {"metrics.console": "off", **flat}, callback, timeout=240)


def together(fitted: list[Fitted]) -> dict[str, torch.Tensor]:
    """Tensors of all ranks by name; where several have one, the same bits."""
    found: dict[str, torch.Tensor] = {}
    for rank in fitted:
        assert rank.problems == (), rank.problems
        for name, value in rank.weights.items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


def saved_tensors(run: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Weights, moments and random streams of a checkpoint, by default of the newest."""
    path = run / "checkpoints"
    return dict(read_tensors(path if step is None else path / f"step-{step:08d}"))


class Died(Exception):
    """What `Dies` raises."""


class Dies(Callback):
    """Leave in the first step, before a save, as a kill does."""

    def on_step_end(self, trainer: Trainer) -> None:
        raise Died


def assert_same_bits(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


def columns(job: Path) -> dict[str, list]:
    metrics = read_run(job.parent / "run").metrics
    return {name: metrics[name] for name in ("step", "loss", "val_loss", "grad_norm", "instances")}


def assert_close(
    got: dict[str, torch.Tensor],
    wanted: dict[str, torch.Tensor],
    bound: float = 1e-5,
    floor: float = 0.0,
) -> None:
    """max|a - b| <= bound max|b| for every tensor; one below `floor` is the rounding noise of a zero."""
    assert got.keys() == wanted.keys()
    off = {}
    for name, value in wanted.items():
        error, size = float((got[name] - value).abs().max()), float(value.abs().max())
        if not error <= max(bound * size, floor):  # not a number is off, too
            off[name] = f"{error:.1e} of {size:.1e}"
    assert not off, off


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """max|got - wanted| / max|wanted|."""
    return float((got - wanted).abs().max() / wanted.abs().max())


def assert_trained_alike(
    got: Any, wanted: Any, start: dict[str, torch.Tensor], bound: float
) -> None:
    """`losses`, `norms` and `weights` of two trainings are equal within `bound`, and every weight left its `start`."""
    assert got.losses == pytest.approx(wanted.losses, rel=bound)
    assert got.norms == pytest.approx(wanted.norms, rel=bound)
    assert got.weights.keys() == wanted.weights.keys()
    errors = {
        name: relative_error(got.weights[name], wanted.weights[name]) for name in wanted.weights
    }
    assert max(errors.values()) <= bound, errors
    moved = {name: relative_error(start[name], wanted.weights[name]) for name in start}
    assert min(moved.values()) > 100 * bound, moved


def assert_same_rows(got: dict[str, list], wanted: dict[str, list]) -> None:
    assert got["step"] == wanted["step"]
    assert got["instances"] == wanted["instances"]  # digests of what was read
    for name in ("loss", "grad_norm"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-5), name
    assert [v and pytest.approx(v, rel=1e-5) for v in wanted["val_loss"]] == got["val_loss"]


def random_batches(
    seed: int, steps: int, shape: tuple[int, int], vocab_size: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random tokens and labels; about a fifth of the labels, differently many a sequence, are ignored."""
    generator, (batch, length) = torch.Generator().manual_seed(seed), shape
    found = []
    for _ in range(steps):
        tokens = torch.randint(0, vocab_size, (batch, length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
        found.append((tokens[:, :-1], labels))
    return found

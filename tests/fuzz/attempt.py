"""A job through the real runner, on the ranks of the pool: all attempts of its run, and what came out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.fuzz.case import load_tensors
from tests.fuzz.double import compute_in_double
from tests.fuzz.job import Job, layout_keys, world_of

from forge_parallel.compute import Compute
from forge_testing import RankError, run_on_ranks
from forge_testing.devices import device
from forge_testing.runs import as_rank
from forge_train import Callback, Trainer, load_job, read_run
from forge_train.errors import ConfigError, DataError, JobError

_STOPPED = 75
#: Limit of a call; blocks of many shapes compile for minutes on a machine with other work.
_SECONDS = 900.0
#: The line of a traceback that names the error.
_ERROR = re.compile(r"^[\w.]+(?:Error|Exception|Interrupt|Exit|Problem|Data)\b.*", re.MULTILINE)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Plan:
    """What happens to one attempt of a run.

    stop, kill  the step after which rank `rank` gets a signal to stop, or dies; 0 for none
    bad         the step whose loss and gradients are multiplied by `factor`; 0 for none
    backend     of compiled blocks
    only_begin  end before the first step
    double      compute in float64; the process stays so
    """

    stop: int = 0
    kill: int = 0
    rank: int = 0
    bad: int = 0
    factor: float = float("inf")
    backend: str = "aot_eager"
    only_begin: bool = False
    double: bool = False


@dataclass(frozen=True)
class Result:
    """What a run wrote and holds: rows of metrics, whole weights and trained buffers before the first step and at the end.

    margins: of each step, the smallest distance of a chosen expert's score from the best one that was not chosen.
    """

    rows: list[dict[str, Any]]
    weights: Tensors
    initial: Tensors = field(default_factory=dict)
    margins: list[float] = field(default_factory=list)


class Rejected(Exception):
    """A problem before the first step: key, code and text."""

    def __init__(self, key: str, code: str, text: str) -> None:
        super().__init__(f"{key} {code}: {text}")
        self.key, self.code, self.text = key, code, text


class Failed(Exception):
    """An accepted job that did not end as it must."""


class _Begun(Exception):
    """Raised before the first step by a plan that ends there."""


class _Events(Callback):
    """Does what a plan says, and keeps the tensors of the first step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.initial: Tensors = {}

    def on_start(self, trainer: Trainer) -> None:
        if trainer.progress.step == 0:
            self.initial = whole_tensors(trainer)
        if self.plan.only_begin:
            raise _Begun

    def around_run(self, run: Any) -> contextlib.AbstractContextManager[Any] | None:
        return _spoiled(self.plan, run) if self.plan.bad else None

    def on_step_end(self, trainer: Trainer) -> None:
        plan = self.plan
        if trainer.meshes.rank == plan.rank and trainer.progress.step in (plan.stop, plan.kill):
            os.kill(os.getpid(), signal.SIGKILL if plan.kill else signal.SIGTERM)


def _spoiled(plan: Plan, run: Any) -> contextlib.AbstractContextManager[Any]:
    """Multiply loss and gradients of the bad step, unless its data were left out by a rollback."""
    gradients = Compute.gradients

    def spoiled(self: Any, batch: Any, normaliser: Any) -> Any:
        share = gradients(self, batch, normaliser)
        if run.progress.step + 1 == plan.bad and not run.loader.skipped:
            share = share * plan.factor
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(plan.factor)
        return share

    return mock.patch.object(Compute, "gradients", spoiled)


def whole_tensors(trainer: Trainer) -> Tensors:
    """Parameters and buffers of this rank's part of the model, unsharded; collective.

    Where other weights are evaluated than trained, the former have the prefix "ema."; of schedule-free only these are left.
    """
    found: dict[str, Any] = dict(trainer.model.state_dict())
    config = trainer.config.optimizer
    if trainer.progress.step and (
        config.ema.decay is not None or config.name == "schedule_free_adamw"
    ):
        for name, slots in trainer.optimizer.named_state().items():
            found[f"ema.{name}"] = found.pop(name)
            if "trained" in slots:
                found[name] = slots["trained"]
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in found.items()
    }


def fit(job: Path, overrides: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """One rank of one attempt, as `forge-train run` would be it."""
    as_rank()
    os.environ["FORGE_CACHE"] = str(job.parent / "cache")
    _set_backend(plan.backend)
    events, step = _Events(plan), 0
    if plan.double:
        compute_in_double()
    try:
        trainer = Trainer(load_job(job, {"parallel.device": device().type, **overrides}), [events])
        try:
            code = int(trainer.fit().exit_code)
        finally:
            step = trainer.progress.step
    except _Begun:
        return {"code": 0, "step": 0, "initial": events.initial, "weights": {}}
    except JobError as error:
        problems = [(p.key, p.code, str(p)) for p in error.problems]
        # a problem that names no key is no rule of Forge
        named = all(p.key for p in error.problems)
        before = step == 0 and named and isinstance(error, ConfigError | DataError)
        return {"code": int(error.exit_code), "step": step, "problems": problems, "before": before}
    weights = whole_tensors(trainer) if code == 0 else {}
    return {"code": code, "step": step, "initial": events.initial, "weights": weights}


def _set_backend(backend: str) -> None:
    """The compiler of blocks, in place of inductor."""
    from forge_train.loop import assemble

    original = getattr(assemble.parallelize, "original", assemble.parallelize)

    def parallelize(*args: Any, **keys: Any) -> Any:
        return original(*args, **{**keys, "compile_backend": backend})

    parallelize.original = original  # type: ignore[attr-defined]
    assemble.parallelize = parallelize


# ---- all attempts


def plans(job: Job, double: bool = False) -> list[Plan]:
    """What happens to each attempt of a run of the job."""
    bad = job.sizes["bad"] if job.has("bad step") else 0
    factor = 100.0 if job["bad step"] == "spike" else float("inf")
    backend = job["compile"] if job.has("compile") else Plan.backend
    last = Plan(bad=bad, factor=factor, backend=backend, double=double)
    if not job.has("restart"):
        return [last]
    world = world_of(layout_keys(job.choice))
    return [replace(last, rank=world - 1, **{job["restart"]: job.sizes["stop"]}), last]


def left_out(job: Job) -> list[list[int]]:
    """Windows of sample indices that a rollback leaves out, last excluded."""
    if job["bad step"] in ("no", "skipped"):
        return []
    batch, bad = job.sizes["global_batch"], job.sizes["bad"]
    before = int(job["bad step"] == "rollback, batches before")
    return [[max(0, bad - 1 - before) * batch, bad * batch]]


def run(job: Job, path: Path, double: bool = False) -> Result:
    """All attempts of the run of `path` in the job's layouts. Raises Rejected before the first step, and Failed."""
    initial: Tensors = {}
    for layout, plan in zip(job.layouts(), plans(job, double), strict=True):
        found = _ranks(world_of(layout), path, layout, plan)
        if plan.kill and found is None:
            continue
        assert found is not None
        codes = {one["code"] for one in found}
        if any(one.get("before") for one in found):
            raise Rejected(*next(one["problems"][0] for one in found if one.get("problems")))
        # a run of so many tokens may end before the step of the signal, or with it
        over = max(one["step"] for one in found) <= plan.stop and codes == {0}
        if codes != {_STOPPED if plan.stop and not over else 0}:
            raise Failed(f"exit codes {codes}: {found[0].get('problems')}")
        initial = initial or together([one["initial"] for one in found])
    return Result(rows_of(path), together([one["weights"] for one in found or ()]), initial)


def begin(path: Path, double: bool = False) -> Tensors:
    """Weights and buffers before the first step, as one process initializes them."""
    return _alone(path, Plan(only_begin=True, double=double)).initial


def run_alone(job: Job, path: Path, double: bool = False) -> Result:
    """The run on one rank, without a restart."""
    return _alone(path, plans(job, double)[-1])


def _alone(path: Path, plan: Plan) -> Result:
    found = _ranks(1, path, {"parallel.dp_shard": 1, "parallel.compile": False}, plan)
    assert found is not None
    if found[0]["code"]:
        before = found[0].get("before")
        problem = found[0]["problems"][0]
        raise Rejected(*problem) if before else Failed(f"one process: {problem}")
    rows = [] if plan.only_begin else rows_of(path)
    return Result(rows, found[0]["weights"], found[0]["initial"])


def run_reference(folder: Path) -> Result:
    """What the reference computes from the case in `folder`, in a process of the pool."""
    try:
        run_on_ranks(1, _refer, folder, timeout=_SECONDS)
    except RankError as error:
        raise Failed(f"the reference: {_told(error)}") from None
    found = json.loads((folder / "reference.json").read_text())
    return Result(found["rows"], load_tensors(folder / "reference.npz"), margins=found["margins"])


def _refer(folder: Path) -> None:
    from tests.fuzz.reference.train import train

    train(folder)


def _ranks(
    world: int, path: Path, layout: Mapping[str, Any], plan: Plan
) -> list[dict[str, Any]] | None:
    """What each rank returned; None where one was killed as planned."""
    try:
        return run_on_ranks(world, fit, path, dict(layout), plan, timeout=_SECONDS)
    except RankError as error:
        if plan.kill and "SIGKILL" in error.reports.get(plan.rank, ""):
            return None
        raise Failed(_told(error)) from None


def _told(error: RankError) -> str:
    """The error of the first rank that raised one, then the reports of all."""
    raised = [
        r.partition("\noutput of rank")[0] for r in error.reports.values() if r.startswith("raised")
    ]
    last = [_ERROR.findall(report)[-1:] or [report.rstrip().splitlines()[-1]] for report in raised]
    return "\n".join([*(line for lines in last[:1] for line in lines), str(error)])


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl of steps from 1 on, one for each step."""
    metrics = read_run(path.parent / "run").metrics
    names = ("step", "loss", "grad_norm", "lr", "tokens", "instances")
    own = [n for n in metrics if n in names or n == "val_loss" or n.startswith("eval/")]
    rows = [dict(zip(own, values)) for values in zip(*(metrics[name] for name in own))]
    return [row for row in rows if row["step"]]


def together(ranks: Sequence[Tensors]) -> Tensors:
    """Tensors of all ranks by name; where several have one, it must be the same bits."""
    found: Tensors = {}
    for tensors in ranks:
        for name, value in tensors.items():
            if not torch.equal(found.setdefault(name, value), value):
                raise Failed(f"ranks hold other values of {name}")
    return found

"""The start of a life of a run: its state is loaded, its files are opened, and a person and the journal learn how it begins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from forge_ckpt import SaveEvent, Store
from forge_core.optim import schedule_warnings
from forge_data.differences import difference_lines
from forge_data.packing import packing_report
from forge_resilience.console import ConsoleSink, console_mode
from forge_resilience.goodput import life_fields
from forge_resilience.recorder import Recorder
from forge_resilience.sinks import JsonlSink, last_row
from forge_train._shared.problems import invalid
from forge_train.build.run_directory import RunDirectory
from forge_train.errors import ConfigError, DataError, run_on_all_ranks
from forge_train.loop.initial import Initial
from forge_train.metrics.columns import SCHEMA
from forge_train.metrics.sinks import find_sinks
from forge_train.protocols import Sink
from forge_train.run.checkpoints import Checkpoints, store_errors
from forge_train.run.run import Run

#: Keys, or how they begin, that the learning rate of a step depends on.
_KEYS_OF_RATES = ("train.steps", "train.tokens", "train.global_batch", "schedule.", "optimizer.lr")
#: What the start reports of a job, by topic: `reasons` and `layout` of several ranks, `sources`, `data` and `optimizer`.
Notes = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Life:
    """How this life of a run began.

    seconds  of the load
    changed  {key: [value before, value now]} since the life before, or since the parent of a fork
    fields   of the event that tell the lives of a run apart
    rates    (step, learning rate) of the last row and of the next step, where the same step has another rate now
    """

    seconds: float
    changed: Mapping[str, list[Any]]
    fields: dict[str, Any]
    rates: list[tuple[int, float]]


def open_store(run: Run) -> Store:
    """The checkpoints of a run. ConfigError where they cannot be there."""
    config = run.config.checkpoint

    def record(event: SaveEvent) -> None:  # called in the thread that writes, too
        if event.kind != "written":
            run.heartbeat.background("save" if event.kind == "staged" else "")
        run.recorder.record_save(event, run.config.resilience.save_limit_seconds)

    with store_errors(run.folder.checkpoints, ConfigError):
        return Store(
            run.folder.checkpoints,
            group=run.meshes.host_group,
            keep=config.keep(),
            digest=config.digest,
            staging_gib=config.staging_gib,
            on_event=record,
            max_failures=config.max_failed_saves,
        )


def restore(
    run: Run, checkpoints: Checkpoints, initial: Initial, changed: Mapping[str, list[Any]]
) -> Life:
    """Load the newest good checkpoint, else what [init] names, and open the recorder. Collective.

    DataError where ranks have other data than rank 0, such as copies on disks of their nodes: votes compare positions only.
    """
    _compare_data(run)
    with run.phase("load"), run.evaluation_point():
        seconds = checkpoints.load(initial.begin(run))
    if checkpoints.last_step >= 0:
        initial.drop()  # a file system may have shown this run's own step late
    elif initial.fork is not None:
        changed = {**changed, **(initial.fork.changed or {})}
    run.count_steps()

    if "train.global_batch" in changed:  # bad steps up to here had other instances than it says
        run.progress.policy.forget_bad_steps()
    step, writes = run.progress.step, run.meshes.rank == 0
    done = run.progress.seconds
    fields = life_fields(run.folder.metrics, step, done, SCHEMA) if writes else {}
    rates = _rates(run, changed) if writes and step < run.total_steps else []

    hosts = run.agreement.exchange(run.folder.host)
    run_on_all_ranks(run.agreement, lambda: initial.record(run, hosts) if writes else None)
    # the row of step 0 is written again
    after = -1 if run.config.eval.at_start and step == 0 else step
    found = _sinks(run) if writes else {}
    run.recorder = Recorder(run.folder.events if writes else None, found, after)
    return Life(seconds, changed, fields, rates)


def _compare_data(run: Run) -> None:
    own = run.loader.stream.fingerprint()
    text = json.dumps(own, sort_keys=True)
    digests = run.agreement.exchange(hashlib.sha256(text.encode()).hexdigest())
    if len({*digests}) == 1:
        return

    first, *rest = run.agreement.exchange(own)
    keys = {key for found in rest for key in {*first, *found} if first.get(key) != found.get(key)}
    ranks = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    rule = f"must be those of rank 0, and differ on ranks {ranks}"
    raise invalid("data", "mismatch", sorted(keys), rule, "copy the files again", kind=DataError)


def _sinks(run: Run) -> dict[str, Callable[[int], Sink]]:
    """From the loaded step to each sink of a run; metrics.jsonl is the first, for which a save waits."""
    rows, mode = run.folder.metrics, console_mode(run.config.metrics.console)
    found: dict[str, Callable[[int], Sink]] = {rows.name: partial(JsonlSink, rows)}
    if mode is not None:
        found["console"] = lambda step: ConsoleSink(mode, step, run.total_steps)
    for name, make in find_sinks(run.config.metrics).items():
        found[f"metrics.sinks.{name}"] = partial(make, run.folder.path)
    return found


def _rates(run: Run, changed: Mapping[str, Any]) -> list[tuple[int, float]]:
    step = run.progress.step
    last = last_rate(run.folder, step) if _keys_of_rates(changed) else None
    return [last, (step + 1, run.next_rate())] if last else []


def _keys_of_rates(changed: Mapping[str, Any]) -> list[str]:
    """The keys among changed ones that give the same step another learning rate."""
    return [key for key in changed if key.startswith(_KEYS_OF_RATES)]


def last_rate(paths: RunDirectory, step: int) -> tuple[int, float] | None:
    """(step, learning rate) of the last row up to a step; None without one."""
    row = last_row(paths.metrics, step, "lr", SCHEMA)
    return None if row is None else (row["step"], float(row["lr"]))


def report_start(
    run: Run, life: Life, initial: Initial, notes: Notes, damaged: Sequence[tuple[int, str]]
) -> None:
    """Say on the terminal and in the journal how this life begins; `damaged` are (step, reason) of checkpoints."""
    run.record_quarantine(damaged)
    for line in _lines(run, life, initial, notes):
        run.report(line)

    step, fork, ranks = run.progress.step, initial.fork, run.meshes.world_size
    event = {
        "step": step,
        "total_steps": run.total_steps,
        "device": str(run.device),
        "world_size": ranks,
        **life.fields,
        **{k: v for k, v in notes.items() if (ranks > 1 if k in ("layout", "reasons") else v)},
    }
    if run.loader.changed:
        event["data_changed"] = run.loader.changed
    if packing := packing_report(run.loader.stream):
        event["packing"] = packing

    if initial.encoder is not None:
        run.record("encoder", step=step, **initial.encoder.event())
    if fork is not None:
        run.record("fork", step=step, **fork.event())
        run.record("start", **event, seconds=life.seconds)
    elif step:
        changes = {"changed": life.changed, "learning_rates": life.rates}
        run.record("resume", **event, seconds=life.seconds, **changes)
    else:
        run.record("start", **event)


def _lines(run: Run, life: Life, initial: Initial, notes: Notes) -> list[str]:
    step, fork = run.progress.step, initial.fork
    lines = [f"layout: {line}" for line in [*notes["reasons"], *notes["layout"]]]
    found = schedule_warnings(run.config.optimizer, run.config.schedule)
    lines += [f"schedule: {line}" for line in found]
    lines += [f"data: {line}" for line in [*notes["sources"], *notes["data"]]]
    lines += [f"data: {line}, accepted" for line in difference_lines(run.loader.changed)]

    if step and fork is None:
        lines.append(f"resume: from step {step} of {run.total_steps}")
        changed = life.changed.items()
        lines += [f"resume: {key} was {was!r} and is {now!r}" for key, (was, now) in changed]
    if life.rates:
        before, after = (f"{rate:.4g} in step {at}" for at, rate in life.rates)
        keys = ", ".join(_keys_of_rates(life.changed))
        lines.append(f"resume: the learning rate was {before} and is {after} ({keys} changed)")
    lines += [f"init: {line}" for line in ([] if fork is None else fork.lines())]
    lines += [f"optimizer: {line}" for line in notes["optimizer"]]
    return lines if initial.encoder is None else [*lines, f"init: {initial.encoder.line()}"]

"""The start of a life of a run: its state is loaded, its files are opened, and what the start reports is gathered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from forge_ckpt import SaveEvent, Store
from forge_resilience.console import ConsoleSink, console_mode
from forge_resilience.goodput import process_start_time
from forge_resilience.progress import Progress
from forge_resilience.recorder import Recorder
from forge_resilience.sinks import JsonlSink
from forge_train.build.run_directory import RunDirectory
from forge_train.errors import ConfigError, run_on_all_ranks
from forge_train.loop.opening import Initial
from forge_train.metrics.columns import last_row
from forge_train.metrics.sinks import find_sinks
from forge_train.protocols import Sink
from forge_train.run.checkpoints import Checkpoints, checkpoint_state, store_errors
from forge_train.run.extension import Extensions
from forge_train.run.run import Run

#: Keys, or how they begin, that the learning rate of a step depends on.
_KEYS_OF_RATES = ("train.steps", "train.tokens", "train.global_batch", "schedule.", "optimizer.lr")


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


def open_checkpoints(
    run: Run, extensions: Extensions, store: Store, tensor_names: set[str]
) -> Checkpoints:
    """What is saved of a run; `tensor_names` are those of all stages."""
    state = checkpoint_state(run, extensions, tensor_names)
    return Checkpoints(
        store,
        run.config.checkpoint,
        extensions.checkpoint_objects(state),
        run.course.tokens,
        lambda step: extensions.call("after_load", step),
    )


def restore(
    run: Run, checkpoints: Checkpoints, initial: Initial, changed: Mapping[str, list[Any]]
) -> Life:
    """Load the newest good checkpoint, else what [init] names, and open the recorder. Collective."""
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
    fields = life_fields(run.folder, run.progress) if writes else {}
    rates = _rates(run, changed) if writes and step < run.total_steps else []

    hosts = run.agreement.exchange(run.folder.host)
    run_on_all_ranks(run.agreement, lambda: initial.record(run, hosts) if writes else None)
    # the row of step 0 is written again
    after = -1 if run.config.eval.at_start and step == 0 else step
    found = _sinks(run) if writes else {}
    run.recorder = Recorder(run.folder.events if writes else None, found, after)
    return Life(seconds, changed, fields, rates)


def _sinks(run: Run) -> dict[str, Callable[[int], Sink]]:
    """From the loaded step to each sink of a run; metrics.jsonl is the first, for which a save waits."""
    metrics, folder = run.config.metrics, run.folder
    found: dict[str, Callable[[int], Sink]] = {
        folder.metrics.name: partial(JsonlSink, folder.metrics)
    }
    mode = console_mode(metrics.console)
    if mode is not None:
        found["console"] = lambda step: ConsoleSink(mode, step, run.total_steps)
    for name, make in find_sinks(metrics).items():
        found[f"metrics.sinks.{name}"] = partial(make, folder.path)
    return found


def life_fields(paths: RunDirectory, progress: Progress) -> dict[str, Any]:
    """`began` of this process; after an earlier life `reached`, the step and time of its last row, and `steps_lost`
    and `seconds_lost`, the training between the loaded checkpoint and that row.

    To be called before metrics.jsonl is cut to the loaded step. Times are seconds since 1970.
    """
    fields: dict[str, Any] = {"began": round(process_start_time(), 3)}
    last = last_row(paths.metrics)
    if last is not None:
        written = paths.metrics.stat().st_mtime
        fields["reached"] = {"step": last["step"], "time": round(written, 3)}
        fields["steps_lost"] = max(0, last["step"] - progress.step)
        seconds = (last.get("seconds") or 0.0) - progress.seconds
        fields["seconds_lost"] = round(max(0.0, seconds), 4)
    return fields


def _rates(run: Run, changed: Mapping[str, Any]) -> list[tuple[int, float]]:
    step = run.progress.step
    last = last_rate(run.folder, step) if keys_of_rates(changed) else None
    return [last, (step + 1, run.next_rate())] if last else []


def keys_of_rates(changed: Mapping[str, Any]) -> list[str]:
    """The keys among changed ones that give the same step another learning rate."""
    return [key for key in changed if key.startswith(_KEYS_OF_RATES)]


def last_rate(paths: RunDirectory, step: int) -> tuple[int, float] | None:
    """(step, learning rate) of the last row up to a step; None without one."""
    row = last_row(paths.metrics, step, "lr")
    return None if row is None else (row["step"], float(row["lr"]))

"""From a resolved job to a run on this process: what can be checked is checked before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from forge_core import flops_per_token
from forge_core.optim import changes_of_older_run
from forge_data import Loader
from forge_parallel import find_world, reshard, select_device
from forge_resilience import NumericsPolicy
from forge_resilience.heartbeat import Heartbeat
from forge_resilience.progress import Progress
from forge_train._shared.problems import invalid
from forge_train.build.begin_tokens import begin_problems, is_older
from forge_train.build.build import (
    Course,
    build_trained,
    freeze_groups,
    run_schedule,
    total_steps,
    total_tokens,
)
from forge_train.build.data import open_data
from forge_train.build.evaluation import Evaluation
from forge_train.build.layout import layout_notes, layout_problems, micro_batches, model_problems
from forge_train.build.resolve import ResolvedJob
from forge_train.build.run_directory import RunDirectory
from forge_train.errors import ConfigError, config_errors, refuse
from forge_train.extensions.built_in import extensions_of
from forge_train.loop.fork import Fork
from forge_train.loop.initial import Initial
from forge_train.loop.start import Notes
from forge_train.plan import describe_placement, with_layout
from forge_train.run.callback import hook_problems, load_callbacks, state_keys
from forge_train.run.extension import Extension, Extensions
from forge_train.run.run import Run


def open_run(
    given: ResolvedJob, users: Sequence[Extension], until: int | None = None
) -> tuple[Run, Extensions, Initial, Notes]:
    """A run on this process, and what its start needs, one of as many as its launcher started; `users` are extensions in addition to those of the job.

    Raises JobError. Nothing is started, and nothing is written.
    """
    heartbeat = Heartbeat.from_environ()
    with config_errors():
        world = find_world()
    job, reasons = with_layout(given, world)
    config = job.config

    refuse(layout_problems(config, world.world_size, world.local_world_size))
    users = [*users, *load_callbacks(config.callbacks)]
    refuse(hook_problems(users))
    with config_errors("parallel"):
        device = select_device(config.parallel.device)
    layout = config.parallel.axes(world.world_size)

    model = build_trained(config)
    refuse(model_problems(model, config, layout))
    # a hook of a user may have run the model, which leaves weights gathered, and changed them since
    found = extensions_of(config, model, users)
    extensions = Extensions(found, users, changed=lambda: reshard(run.model))
    state_keys(extensions)
    length = total_steps(config, model)
    if until is not None and not 1 <= until <= length:
        rule = f"must be from 1 to {length}, the steps of the run"
        raise invalid("until", "range", until, rule, kind=ConfigError)
    refuse(extensions.problems(config, world.world_size, length))

    freeze_groups(model, config)
    with config_errors("schedule"):
        schedule = run_schedule(config, length)
    folder = RunDirectory(config.run.dir)
    refuse(begin_problems(job, folder))  # before texts are tokenized again
    loader, held_out = open_data(config, model, layout, world.rank)

    course, own = Course(config), config.resilience
    policy = NumericsPolicy(own.nonfinite, own.spike, own.rollback)

    run = Run(
        job=job,
        folder=folder,
        rank=world.rank,
        device=device,
        model=model,
        loader=loader,
        course=course,
        evaluation=Evaluation(config, held_out),
        extensions=extensions,
        division=micro_batches(config, layout),
        schedule=schedule,
        flops_per_token=[flops_per_token(model, s.seq_len) for s in course.segments],
        progress=Progress(policy, world.world_size),
        total_steps=length,
        total_tokens=total_tokens(config, model),
        heartbeat=heartbeat,
    )

    loader.on_event = lambda event, **fields: _record_data(run, event, **fields)
    initial = Initial.find(run)
    notes = {
        "layout": describe_placement(config.parallel, world, model),
        "reasons": [*reasons, *layout_notes(config, layout)],
        "sources": list(getattr(loader.stream, "source_lines", ())),
        "data": _data_notes(loader, held_out),
        "optimizer": _changes_of_older_run(run, initial.fork),
    }
    return run, extensions, initial, notes


def _data_notes(loader: Loader, held_out: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, stream in {"": loader.stream, **held_out}.items():
        found = getattr(stream, "warnings", ())
        lines += [f"{key}: {line}" if key else line for line in found]
    return lines


def _changes_of_older_run(run: Run, fork: Fork | None) -> list[str]:
    """What the optimizer does otherwise than in the older run that it goes on from."""
    source, before = None if fork is None else fork.source.run, run.folder
    if source is not None and "optimizer" in run.config.init.keep:
        before = RunDirectory(source)
    return changes_of_older_run(run.model, run.config.optimizer) if is_older(before) else []


def _record_data(run: Run, event: str, **fields: Any) -> None:
    """An event of the loader; of another rank than 0, which keeps the journal, a line on stderr."""
    if run.rank:
        print(f"forge-train: rank {run.rank}: {event} {fields}", file=sys.stderr)
    run.record(event, step=run.progress.step, rank=run.rank, **fields)

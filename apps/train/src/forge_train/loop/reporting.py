"""What the start of a life of a run says: lines for a person, and the events `start`, `resume` and `fork`."""

from __future__ import annotations

from collections.abc import Sequence

from forge_data.differences import difference_lines
from forge_data.packing import packing_report
from forge_train.build.resolve import schedule_warnings
from forge_train.loop.opening import Initial, Notes
from forge_train.loop.start import Life, keys_of_rates
from forge_train.run.run import Run


def report_start(
    run: Run, life: Life, initial: Initial, notes: Notes, damaged: Sequence[tuple[int, str]]
) -> None:
    """Say on the terminal and in the journal how this life begins; `damaged` are (step, reason) of checkpoints."""
    run.record_quarantine(damaged)
    for line in _lines(run, life, initial, notes):
        run.report(line)
    step, fork, encoder = run.progress.step, initial.fork, initial.encoder
    event = {
        "step": step,
        "total_steps": run.total_steps,
        "device": str(run.device),
        "world_size": run.meshes.world_size,
        **life.fields,
        **notes.fields(run.meshes.world_size),
    }
    if run.loader.changed:
        event["data_changed"] = run.loader.changed
    if packing := packing_report(run.loader.stream):
        event["packing"] = packing
    if encoder is not None:
        run.record("encoder", step=step, **encoder.event())
    if fork is not None:
        run.record("fork", step=step, **fork.event())
        run.record("start", **event, seconds=life.seconds)
    elif step:
        changes = {"changed": life.changed, "learning_rates": life.rates}
        run.record("resume", **event, seconds=life.seconds, **changes)
    else:
        run.record("start", **event)


def _lines(run: Run, life: Life, initial: Initial, notes: Notes) -> list[str]:
    step, fork, encoder = run.progress.step, initial.fork, initial.encoder
    lines = [f"layout: {line}" for line in [*notes.reasons, *notes.placement]]
    lines += [f"schedule: {line}" for line in schedule_warnings(run.config)]
    lines += [f"data: {line}" for line in [*notes.sources, *notes.data]]
    lines += [f"data: {line}, accepted" for line in difference_lines(run.loader.changed)]
    if step and fork is None:
        lines.append(f"resume: from step {step} of {run.total_steps}")
        changed = life.changed.items()
        lines += [f"resume: {key} was {was!r} and is {now!r}" for key, (was, now) in changed]
    if life.rates:
        before, after = (f"{rate:.4g} in step {at}" for at, rate in life.rates)
        keys = ", ".join(keys_of_rates(life.changed))
        lines.append(f"resume: the learning rate was {before} and is {after} ({keys} changed)")
    lines += [f"init: {line}" for line in ([] if fork is None else fork.lines())]
    lines += [f"optimizer: {line}" for line in notes.optimizer]
    return lines if encoder is None else [*lines, f"init: {encoder.line()}"]

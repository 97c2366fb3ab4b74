"""The verbs `forge-train replay` and `forge-train bisect`."""

from __future__ import annotations

import contextlib
import json as _json
import os
import pkgutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from forge_lab._shared.problems import invalid
from forge_resilience import ExitCode, StopSignal
from forge_train.command_line import is_rank_of_many
from forge_train.errors import ConfigError, StateError

if TYPE_CHECKING:
    from forge_lab.study.replay import Replayed

_LISTED = 32  # sequences of a step that are printed


def replay(
    run_dir: tyro.conf.Positional[Path],
    /,
    step: int,
    nproc: int | None = None,
    anomaly: bool = False,
    debugger: bool = False,
    hook: tuple[str, ...] = (),
    callbacks: bool = False,
    set: tuple[str, ...] = (),
    output: Path | None = None,
    record: Path | None = None,
    from_step: int | None = None,
    json: bool = False,
) -> int:
    """Train a step of a run again, exactly, and list the documents that it saw. The run's folder is only read.

    The replay begins at the newest checkpoint before that step. Nothing is saved, evaluated, or sent to sinks. `--section.key value`
    changes a key of the configuration, such as `--parallel.tp 1` for another layout.

    Args:
        run_dir: folder of a run, finished or not
        step: the step to train again, counted from 1
        nproc: processes on this machine; without it as many as the run had
        anomaly: torch's anomaly mode in that step: names the operation that made nan
        debugger: stop in pdb before that step (one process)
        hook: module:attr, called with the Trainer before that step; a context manager that it returns is exited
            after it
        callbacks: with the job's own callbacks, which may act outside of the replay
        set: KEY=VALUE, the spelling of --KEY VALUE before 0.2.0
        output: new folder for files of the trainer; without it a temporary one; under a launcher it is needed, and
            all ranks must see it
        record: write weights, outputs and gradients of the steps here, for bisect
        from_step: with --record: all steps after this one; without it after the newest checkpoint before
            --step
        json: print one JSON object
    """
    from forge_lab.study.private_job import find_start, parse_settings, read_journal

    if from_step is not None and record is None:
        rule, fix = "must go with --record", "give --record DIR, too"
        raise invalid("--from_step", "requires", from_step, rule, fix, kind=ConfigError)
    if record is not None and (anomaly or debugger or json or hook):
        rule = "and flags that inspect one step (--anomaly, --debugger, --hook, --json) exclude each other"
        fix = "leave one or the other out"
        raise invalid("--record", "excludes", str(record), rule, fix, kind=ConfigError)
    if nproc is not None and nproc < 1:
        fix = "leave it out for as many as the run had"
        raise invalid("--nproc", "range", nproc, "must be at least 1", fix, kind=ConfigError)
    many = is_rank_of_many()
    if many and output is None:
        rule = "must name a new folder that all ranks see, as a launcher started several"
        raise invalid("--output", "missing", ..., rule, kind=ConfigError)

    find_start(run_dir, step)  # its errors come here once, before ranks start
    ranks = 1 if many else nproc or read_journal(run_dir).world_size_for(step) or 1
    if debugger and (many or ranks > 1):
        rule = f"needs one process, and there are {ranks if not many else 'several'}"
        fix = "use --nproc 1 with keys of a layout for one"
        raise invalid("--debugger", "processes", ..., rule, fix, kind=ConfigError)

    if ranks > 1:
        flags = {"anomaly": anomaly, "callbacks": callbacks, "json": json}
        args = [f"--{name}" for name, given in flags.items() if given]
        values = {"step": step, "record": record, "from_step": from_step}
        args += [f"--{name}={value}" for name, value in values.items() if value is not None]
        args += [f"--{pair}" for pair in set]
        args += ["--hook", *hook] if hook else []
        with tempfile.TemporaryDirectory(prefix="forge-replay-") as folder:
            args.append(f"--output={output or Path(folder, 'run')}")
            return start_ranks(ranks, ["replay", str(run_dir), *args])
    if record is not None:
        return _record(run_dir, step, from_step, callbacks, set, output, record)

    from forge_lab.study.replay import replay_step

    found = replay_step(
        run_dir,
        step,
        hooks=[_import(name) for name in hook],
        anomaly=anomaly,
        debugger=debugger,
        callbacks=callbacks,
        settings=parse_settings(set),
        output=output,
    )
    if found.trainer.meshes.rank == 0:
        print(_json.dumps(_as_json(found)) if json else "\n".join(_lines(run_dir, found)))
    return ExitCode.DONE


def bisect(
    run_a: tyro.conf.Positional[Path],
    run_b: tyro.conf.Positional[Path],
    /,
    tolerance: float | None = None,
    logged_only: bool = False,
    callbacks: bool = False,
    json: bool = False,
) -> int:
    """Find the first step and module at which two runs of one model differ, by replays of both. Ends with 1 if they do.

    Each run is replayed in its own layout on this machine, from their last common checkpoint. To compare machines or
    versions, record each there with `replay RUN --step N --record DIR`, and give the two records.

    Args:
        run_a: folder of a run, or a record
        run_b: the other one
        tolerance: relative bound; without it 0, the same bits; 1e-3 for replays in two layouts
        logged_only: compare only rows and checkpoints, without replays
        callbacks: replay with the jobs' own callbacks, which may act outside
        json: print one JSON object
    """
    from forge_lab.study.bisect import bisect_records, bisect_runs

    records = [(folder / "record.json").is_file() for folder in (run_a, run_b)]
    if any(records) and not all(records):
        rule = f"and {str(run_a)!r} must be two runs or two records"
        fix = "write a record of the run, too"
        raise invalid("run_b", "mismatch", str(run_b), rule, fix, kind=ConfigError)
    if tolerance is not None and not 0 <= tolerance < 1:
        rule = "must be from 0, the same bits, to below 1"
        raise invalid("--tolerance", "range", tolerance, rule, "leave it out", kind=ConfigError)
    if any(records) and (logged_only or callbacks):
        key = "--logged_only" if logged_only else "--callbacks"
        rule = "must go with runs: a record is a replay already"
        raise invalid(key, "excludes", ..., rule, "leave it out", kind=ConfigError)

    if all(records):
        verdict = bisect_records(run_a, run_b, tolerance)
    else:

        def replay_side(run: Path, start: int, end: int, folder: Path) -> None:
            args = [f"--step={end}", f"--from_step={start}", f"--record={folder}"]
            args += ["--callbacks"] if callbacks else []
            _run(["replay", str(run), *args], run, folder.parent)

        verdict = bisect_runs(run_a, run_b, replay_side, tolerance, logged_only)
    print(_json.dumps(verdict.as_json()) if json else verdict.text)
    return ExitCode.ERROR if verdict.differs else ExitCode.DONE


def _run(args: list[str], run: Path, folder: Path) -> None:
    """Run a verb in a process of its own, which may start ranks, with its temporary files in `folder`.

    A signal is passed on, and the process waited for: then KeyboardInterrupt. StateError where the verb fails.
    """
    command = [sys.executable, "-m", "forge_train", *args]
    environment = {**os.environ, "TMPDIR": str(folder)}
    passed_on = False
    with (
        StopSignal(announce=False) as stop,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as child,
    ):
        while child.poll() is None:
            if stop.requested and not passed_on:
                child.send_signal(stop.number)
                passed_on = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.2)

    if stop.requested:
        raise KeyboardInterrupt
    if child.returncode:
        raise StateError([f"the replay of {run} ended with code {child.returncode}, see above"])


def start_ranks(nproc: int, args: list[str]) -> int:
    """Run a verb of forge-train in `nproc` processes of this machine, without a watch; its exit code."""
    from forge_resilience.local_workers import run_local_workers

    command = [sys.executable, "-m", "forge_train", *args]
    return run_local_workers(command, nproc, {**os.environ, "FORGE_NPROC": str(nproc)})


def _record(
    run: Path,
    step: int,
    from_step: int | None,
    callbacks: bool,
    settings: tuple[str, ...],
    output: Path | None,
    folder: Path,
) -> int:
    """Write a record of the steps after `from_step` to `step`, on this rank."""
    from forge_lab.study.private_job import find_start, parse_settings, private_job
    from forge_lab.study.record import Recorder
    from forge_lab.study.replay import private_folder, train_again

    start = find_start(run, step if from_step is None else from_step + 1)
    first = (start if from_step is None else from_step) + 1
    if first > step:
        rule, fix = f"must be before --step {step}", "name an earlier one"
        raise invalid("--from_step", "order", from_step, rule, fix, kind=ConfigError)
    if (folder / "record.json").exists():
        rule, fix = "holds a record", "name a new folder"
        raise invalid("--record", "exists", str(folder), rule, fix, kind=StateError)

    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder, run, first, step)
    with private_folder(run, output) as private:
        job = private_job(run, start, private, parse_settings(settings), callbacks)
        trainer = train_again(job, recorder)
        recorder.write_head(start, callbacks)
    if trainer.meshes.rank == 0:
        print(f"steps {first} to {step} of {run} are recorded in {folder}")
    return ExitCode.DONE


def _import(name: str) -> Any:
    """Import the function of --hook. ConfigError."""
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        rule, fix = f"cannot be imported ({error})", "name it module:attr"
        raise invalid("--hook", "not_found", name, rule, fix, kind=ConfigError) from error
    if not callable(found):
        rule = f"must be called with the Trainer, and is a {type(found).__name__}"
        raise invalid("--hook", "type", name, rule, "name a function", kind=ConfigError)
    return found


def _as_json(found: Replayed) -> dict[str, Any]:
    names = ("step", "start", "row", "logged", "differs", "changed")
    return {n: getattr(found, n) for n in names} | {"seen": [asdict(row) for row in found.seen]}


def _lines(run: Path, found: Replayed) -> list[str]:
    """A replayed step for a person."""
    from forge_lab.study.replay import COMPARED

    begin = f"its checkpoint of step {found.start}" if found.start else "its initial state"
    ranks = found.trainer.meshes.world_size
    processes = "1 process" if ranks == 1 else f"{ranks} processes"
    lines = [f"step {found.step} of {run}, trained again from {begin} on {processes}"]
    lines += [
        f"not as when the run trained it: {k} was {a!r} and is {b!r}"
        for k, (a, b) in found.changed.items()
    ]

    if found.logged is None:
        lines.append(
            "the run has no row of this step: it logs every metrics.every_steps, or has not come so far"
        )
    for name in COMPARED:
        line = f"  {name:10} {found.row.get(name)!s:24}"
        if found.logged is not None:
            same = name not in found.differs
            line += "the same bits as logged" if same else f"logged {found.logged.get(name)}"
        lines.append(line.rstrip())

    lines.append(f"it saw {len(found.seen)} rows:")
    for row in found.seen[:_LISTED]:
        for number, text in enumerate(row.texts):
            document = "" if row.documents is None else f" document {row.documents[number]}"
            where = f"  instance {row.instance}, {row.source}" if not number else "   "
            lines.append(f"{where}{document}: {text!r}")
    if len(found.seen) > _LISTED:
        lines.append(f"  and {len(found.seen) - _LISTED} more, see --json")
    return lines

"""The forge-train command: verbs, exit codes, and nothing that a library user would need.

Heavy modules are imported by the verb that needs them: help and refusals come at once.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import tyro
from rich.console import Console

from forge_resilience import ExitCode, StopSignal

if TYPE_CHECKING:
    from forge_train.config.layers import Layers
    from forge_train.config.resolve import ResolvedJob
    from forge_train.errors import JobError

_LONGEST = 4000  # characters of a sentence: what a user gave may be a megabyte
USAGE = "usage: forge-train VERB ...   (forge-train VERB --help says more)"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one verb and leave with its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    _prepare_process(args)
    code: int = ExitCode.DONE
    with contextlib.suppress(BrokenPipeError):  # `forge-train --help | head` has seen enough
        code = int(_dispatch(args))
    for descriptor, stream in enumerate((sys.stdout, sys.stderr), start=1):
        try:
            stream.flush()
        except OSError as error:
            if not _reader_left(error):
                raise
            # Python's own flush at exit would fail again and change the exit code to 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    if args[:1] == ["run"] and _is_rank_of_many():
        from forge_parallel import leave

        leave(code)
    gc.freeze()  # at exit Python looks for cycles in all that torch imported: 0.6 s of a refusal
    sys.exit(code)


def _reader_left(error: OSError) -> bool:
    """Output failed because a pipe is closed (EPIPE) or a terminal is gone (EIO)."""
    return error.errno in (errno.EPIPE, errno.EIO)


def _is_rank_of_many() -> bool:
    """What a launcher left in the environment, read before anything heavy is imported."""
    worlds = (os.environ.get(name, "") for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
    return any(world.isdecimal() and int(world) > 1 for world in worlds)


#: Opened as early as can be in a rank of many, where a stop is for all ranks to agree on.
_early_stop = StopSignal(
    announce=os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
)


def _prepare_process(args: Sequence[str]) -> None:
    """Closed streams, odd encodings and early signals must not decide how a run ends."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    with contextlib.suppress(OSError):  # a folder that is gone
        # import paths of a configuration find modules in the working folder, after all that is installed
        sys.path.append(os.getcwd())
    if args[:1] != ["run"]:
        return
    if _is_rank_of_many():
        _early_stop.__enter__()
    else:  # until the loop has a handler of its own: nothing is lost yet, so the job is requeued
        # Not by an exception: torch and numpy import from C code, which drops it or keeps a lock.
        _leave_on_signal(ExitCode.REQUEUE, signal.SIGINT)


def _dispatch(args: list[str]) -> int:
    from forge_train.errors import JobError

    verb, rest = (args[0], args[1:]) if args else ("--help", [])
    if verb in ("--help", "-h"):
        return _help()
    if verb not in VERBS:
        mounted = _mounted()
        if verb in mounted:
            return int(mounted[verb].load()(rest))
        near = ", ".join([*VERBS, *mounted])
        return _fail(
            [f"{verb!r} is not a verb of forge-train; use one of {near}"], ExitCode.CONFIG_ERROR
        )
    try:
        _refuse_doubles(rest)
        return VERBS[verb](rest)
    except JobError as error:
        return _fail(_of_this_rank(error), error.exit_code)
    except SystemExit as stop:  # tyro: 0 after help, 2 after a bad flag
        return ExitCode.CONFIG_ERROR if stop.code == 2 else stop.code  # type: ignore[return-value]
    except KeyboardInterrupt:  # outside the loop, which has a handler of its own
        return _fail(["interrupted; what was saved before is intact"], ExitCode.REQUEUE)
    except RuntimeError as error:
        cause = _lost_rank(error)
        if cause is None:
            raise
        return _fail(cause, ExitCode.ERROR)


def run(args: list[str]) -> int:
    """Train what CONFIG describes, or resume from the newest checkpoint in its run directory.

    `--nproc N` starts N processes on this machine; under torchrun, srun or RANK/WORLD_SIZE each
    process is one rank of the job.
    """
    nproc, rest = _nproc(args)
    job = _job(rest, "run", run.__doc__ or "")
    if nproc is not None and nproc > 1:
        return _run_local_workers(job, rest, nproc)
    from forge_parallel import StartError, launch
    from forge_train.errors import JobError
    from forge_train.report.summary import print_summary
    from forge_train.trainer.trainer import Trainer

    trainer = Trainer(job)
    try:
        with launch(job.config.parallel, {"configuration": job.digest()}) as meshes:
            result = trainer.fit(meshes, _early_stop if _is_rank_of_many() else None)
            # the run is over: a signal during the sample ends the process with the run's code at once
            _leave_on_signal(result.exit_code)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                print_summary(trainer, result, rest)
            except KeyboardInterrupt:
                pass
            except (
                OSError
            ) as error:  # the run is saved: a closed pipe does not change its exit code
                if not _reader_left(error):
                    raise
            except RuntimeError as error:  # a rank that is gone, no memory for the sample
                if meshes.rank == 0:
                    print(f"forge-train: no sample: {error}", file=sys.stderr)
    except StartError as error:
        failure = JobError(str(error).splitlines())
        failure.shared = error.shared
        raise failure from error
    return result.exit_code


def _leave_on_signal(code: int, *more: signal.Signals) -> None:
    """End this process with `code` on SIGTERM, SIGUSR1 and `more`, at once: nothing is flushed."""
    ignored = (
        signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    )  # nohup: the run outlives its terminal
    hang_up = () if ignored else (signal.SIGHUP,)
    for number in (signal.SIGTERM, signal.SIGUSR1, *hang_up, *more):
        signal.signal(number, lambda *_: os._exit(code))


def _refuse_doubles(args: Sequence[str]) -> None:
    """Refuse a flag that is given twice: parsers would take the last one silently."""
    from forge_train.errors import ConfigError

    names = [arg.partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--")]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(
            [f"--{name[2:]} must be given once, and it is there {names.count(name)} times; leave "
             "one out" for name in twice]
        )  # fmt: skip


def _nproc(args: list[str]) -> tuple[int | None, list[str]]:
    """`--nproc N` or `--nproc=N`, and the other arguments."""
    from forge_train.errors import ConfigError

    rest = list(args)
    for i, arg in enumerate(rest):
        name, equals, value = arg.partition("=")
        if name != "--nproc":
            continue
        value = value if equals else "".join(rest[i + 1 : i + 2])
        del rest[i : i + (1 if equals else 2)]
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError([f"--nproc {value!r} must be a number of processes; use --nproc 2"])
        if _is_rank_of_many():
            raise ConfigError(
                [f"--nproc {value} starts processes, but this process is already one of several that "
                 "a launcher started; leave it out"]
            )  # fmt: skip
        return int(value), rest
    return None, rest


def _run_local_workers(job: ResolvedJob, args: list[str], nproc: int) -> int:
    """Run the same command in `nproc` processes; problems of the layout are found here, once."""
    from forge_resilience import run_local_workers

    _refuse_layout(job, nproc)
    command = [sys.executable, "-m", "forge_train", "run", *args]
    return run_local_workers(command, nproc, {**os.environ, "FORGE_NPROC": str(nproc)})


def explain(args: list[str]) -> int:
    """Print the resolved configuration of CONFIG: each value and where it came from.

    With `--nproc N` also what keeps N processes from running it, the layout that they get, and what their
    number costs.
    """
    from forge_train.config.describe import print_explanation

    nproc, rest = _nproc(args)
    job = _job(rest, "explain", explain.__doc__ or "")
    lines: list[str] = []
    if nproc is not None:
        job, lines = _on_processes(job, nproc)
    print_explanation(job, Console())
    for line in lines:
        print(line)
    return ExitCode.DONE


def _on_processes(job: ResolvedJob, nproc: int) -> tuple[ResolvedJob, list[str]]:
    """The job with its layout on `nproc` processes of this machine, and remarks about that layout."""
    from forge_parallel import World
    from forge_train.trainer.auto_layout import with_layout
    from forge_train.trainer.layout import remarks

    job, reasons = with_layout(job, World(world_size=nproc, local_world_size=nproc))
    _refuse_layout(job, nproc)
    return job, reasons + remarks(job.config, job.config.parallel.axes(nproc, nproc))


def _refuse_layout(job: ResolvedJob, nproc: int) -> None:
    from forge_train.errors import ConfigError
    from forge_train.trainer.layout import layout_problems

    problems = layout_problems(job.config, nproc, nproc)
    if problems:
        raise ConfigError(problems)


def plan(args: list[str]) -> int:
    """Say what CONFIG needs on --gpus N [--gpu h200] [--nodes M], how long a step takes, what else there is.

    The data need not be there.
    """
    from forge_train.config.resolve import resolve
    from forge_train.plan import PlanFlags, show_plan

    layers, flags = _layers(args, "plan", plan.__doc__ or "", PlanFlags)
    show_plan(resolve(layers, with_data=False).config, PlanFlags(**flags))
    return ExitCode.DONE


def generate(args: list[str]) -> int:
    """Stream text from the newest good checkpoint of a run."""
    from forge_train.report.text import stream_text

    return tyro.cli(stream_text, prog="forge-train generate", args=args, use_underscores=True)


def doctor(args: list[str]) -> int:
    """Say what this machine can do and what to install: 0 ready, 1 something missing, 2 broken."""

    def options(
        json: Annotated[
            bool, tyro.conf.arg(help="print one JSON object instead of a table")
        ] = False,
    ) -> int:
        from forge_train.doctor import examine

        return examine(as_json=json)

    return tyro.cli(
        options,
        prog="forge-train doctor",
        description=doctor.__doc__,
        args=args,
        use_underscores=True,
    )


VERBS: dict[str, Callable[[list[str]], int]] = {
    "run": run,
    "explain": explain,
    "plan": plan,
    "generate": generate,
    "doctor": doctor,
}


def _mounted() -> dict[str, EntryPoint]:
    """Command lines of installed packages: `forge-train ckpt ...` is `forge-ckpt ...`."""
    return {entry.name: entry for entry in entry_points(group="forge.commands")}


def _job(args: list[str], verb: str, description: str) -> ResolvedJob:
    """The job of `CONFIG [--section.key value ...]`."""
    layers, _ = _layers(args, verb, description)
    from forge_train.config.resolve import resolve

    return resolve(layers)


def _layers(
    args: list[str], verb: str, description: str, own: type | None = None
) -> tuple[Layers, dict[str, Any]]:
    """The file with the flags laid over it, and the flags of the verb: those of the dataclass `own`."""
    from forge_train.config.layers import NAMED_TABLES, Layers, read_layers
    from forge_train.errors import ConfigError

    config = _positional(args)
    wants_help = {"-h", "--help"} & set(args)
    if config is None and not wants_help:
        raise ConfigError([f"forge-train {verb} needs a TOML file; forge-train {verb} CONFIG.toml"])
    layers = Layers() if config is None else read_layers(Path(config))
    # imports torch, which takes seconds: a file that cannot be read is refused before
    from forge_train.config.flags import parse_flags

    for table, (key, value) in NAMED_TABLES.items() if wants_help else ():
        if layers.at(table) is None:
            layers.set(f"{table}.NAME.{key}", value, "example")
    flags = [arg for arg in args if arg is not config]
    prog = f"forge-train {verb} CONFIG.toml"
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors) if _is_rank_of_many() else contextlib.nullcontext():
            parsed = parse_flags(layers.values, flags, prog, description, own)
    except SystemExit as stop:
        if stop.code and errors.getvalue():  # every rank finds it, one prints it
            raise ConfigError(errors.getvalue().splitlines()) from stop
        raise
    for key in [key for key in parsed if "." in key]:
        layers.set(key, parsed.pop(key), "flag")
    return layers, parsed


def _positional(args: Sequence[str]) -> str | None:
    """CONFIG, which comes before the first flag."""
    return args[0] if args and not args[0].startswith("-") else None


def _help() -> int:
    from forge_train.config.describe import print_keys

    console = Console()
    print(USAGE, "\n\nverbs")
    for name, verb in VERBS.items():
        print(f"  {name:10} {(verb.__doc__ or '').splitlines()[0]}")
    for name, entry in _mounted().items():
        print(f"  {name:10} The command line of {entry.value.split('.')[0]}.")
    print("\nexit codes")
    for code in ExitCode:
        print(f"  {int(code):<10} {code.name.lower().replace('_', ' ')}")
    print("\nkeys of a configuration file, each also a flag of run and explain")
    print_keys(console)
    return ExitCode.DONE


def _of_this_rank(error: JobError) -> Sequence[str]:
    """The problems that this process prints: rank 0 prints errors of all ranks, and each rank its own, with its number.

    Configuration and data are read before the ranks have met: one rank of each host prints those problems, as
    another host may have other files.
    """
    if not _is_rank_of_many():
        return error.problems
    from forge_parallel import find_world
    from forge_train.errors import ConfigError, DataError

    try:
        world = find_world()
    except ValueError:  # the environment was the problem
        return error.problems
    of_the_host = isinstance(error, ConfigError | DataError)
    if world.rank == 0 and (error.shared or of_the_host):
        return error.problems
    if error.shared or (of_the_host and world.local_rank > 0):
        return ()
    return [f"rank {world.rank}: {problem}" for problem in error.problems]


def _lost_rank(error: RuntimeError) -> Sequence[str] | None:
    """The problems that a rank prints when another rank is gone; None for any other error.

    Rank 0 prints a line, and the launcher names the rank that is gone; without a launcher every rank prints one.
    """
    if not _is_rank_of_many():
        return None
    from forge_parallel import find_world
    from forge_parallel.start import lost_rank

    cause = lost_rank(error)
    if cause is None:
        return None
    world = find_world()
    if world.rank > 0 and (world.launcher != "environment" or "FORGE_NPROC" in os.environ):
        return ()
    return [f"rank {world.rank}: another rank is gone ({cause}); what was saved before is intact"]


def _fail(problems: Sequence[str], code: int) -> int:
    with contextlib.suppress(OSError):  # a terminal that is gone changes no code
        for problem in problems:
            print(f"forge-train: {problem[:_LONGEST]}", file=sys.stderr)
    return code

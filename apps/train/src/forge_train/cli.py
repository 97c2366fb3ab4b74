"""The forge-train command: verbs, exit codes, and nothing that a library user would need.

Heavy modules are imported by the verb that needs them: help and refusals come at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import tyro
from rich.console import Console

from forge_resilience import ExitCode

if TYPE_CHECKING:
    from forge_train.config.resolve import ResolvedJob

USAGE = "usage: forge-train VERB ...   (forge-train VERB --help says more)"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one verb and leave with its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    _prepare_process(args)
    code: int = ExitCode.DONE
    try:
        code = int(_dispatch(args))
        sys.stdout.flush()
    except BrokenPipeError:  # `forge-train --help | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


def _prepare_process(args: Sequence[str]) -> None:
    """Closed streams, odd encodings and early signals must not decide how a run ends."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    with contextlib.suppress(OSError):  # a folder that is gone
        # import paths in a configuration start where the user stands, after everything installed
        sys.path.append(os.getcwd())
    if args[:1] == [
        "run"
    ]:  # until the loop's own handler: nothing is lost yet, so simply come again
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda *_: sys.exit(ExitCode.REQUEUE))


def _dispatch(args: list[str]) -> int:
    from forge_train.errors import JobError

    verb, rest = (args[0], args[1:]) if args else ("--help", [])
    if verb in ("--help", "-h"):
        return _help()
    if verb not in VERBS:
        near = ", ".join(VERBS)
        return _fail(
            [f"{verb!r} is not a verb of forge-train; use one of {near}"], ExitCode.CONFIG_ERROR
        )
    try:
        return VERBS[verb](rest)
    except JobError as error:
        return _fail(error.problems, error.exit_code)
    except SystemExit as stop:  # tyro: 0 after help, 2 after a bad flag
        return ExitCode.CONFIG_ERROR if stop.code == 2 else stop.code  # type: ignore[return-value]
    except KeyboardInterrupt:  # outside the loop, which has a handler of its own
        return _fail(["interrupted; what was saved before is intact"], ExitCode.REQUEUE)


def run(args: list[str]) -> int:
    """Train what CONFIG describes, or go on where its run directory stands."""
    job = _job(args, "run", run.__doc__ or "")
    from forge_parallel import shutdown
    from forge_train.report.summary import print_summary
    from forge_train.trainer.trainer import Trainer

    trainer = Trainer(job)
    result = trainer.fit()
    # the run is over and saved: a reader who left, or has no patience for the sample, changes no code
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        print_summary(trainer, result, args)
    shutdown()
    return result.exit_code


def explain(args: list[str]) -> int:
    """Print the resolved configuration of CONFIG: each value and where it came from."""
    from forge_train.config.describe import print_explanation

    print_explanation(_job(args, "explain", explain.__doc__ or ""), Console())
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
    "generate": generate,
    "doctor": doctor,
}


def _job(args: list[str], verb: str, description: str) -> ResolvedJob:
    """The job of `CONFIG [--section.key value ...]`."""
    from forge_train.config.flags import parse_flags
    from forge_train.config.layers import Layers, read_layers
    from forge_train.config.resolve import resolve
    from forge_train.errors import ConfigError

    config = _positional(args)
    wants_help = {"-h", "--help"} & set(args)
    if config is None and not wants_help:
        raise ConfigError([f"forge-train {verb} needs a TOML file; forge-train {verb} CONFIG.toml"])
    layers = Layers() if config is None else read_layers(Path(config))
    data = layers.values.get("data", {})
    if wants_help and isinstance(data, dict) and "sources" not in data:
        layers.set("data.sources.NAME.name", "builtin", "example")
    flags = [arg for arg in args if arg is not config]
    prog = f"forge-train {verb} CONFIG.toml"
    for key, value in parse_flags(layers.values, flags, prog, description).items():
        layers.set(key, value, "flag")
    return resolve(layers)


def _positional(args: Sequence[str]) -> str | None:
    """CONFIG stands before the first flag."""
    return args[0] if args and not args[0].startswith("-") else None


def _help() -> int:
    from forge_train.config.describe import print_keys

    console = Console()
    print(USAGE, "\n\nverbs")
    for name, verb in VERBS.items():
        print(f"  {name:10} {verb.__doc__}")
    print("\nexit codes")
    for code in ExitCode:
        print(f"  {int(code):<10} {code.name.lower().replace('_', ' ')}")
    print("\nkeys of a configuration file, each also a flag of run and explain")
    print_keys(console)
    return ExitCode.DONE


def _fail(problems: Sequence[str], code: int) -> int:
    for problem in problems:
        print(f"forge-train: {problem}", file=sys.stderr)
    return code

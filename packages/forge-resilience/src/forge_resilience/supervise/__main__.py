"""The command line: `python -m forge_resilience.supervise [--nproc N] [options] -- COMMAND ...`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from forge_resilience._shared.streams import tolerate
from forge_resilience.exit_codes import ExitCode
from forge_resilience.supervise.guard import run_guarded
from forge_resilience.supervise.supervisor import supervise
from forge_resilience.supervise.watch import WatchConfig

_WRONG_COMMAND = (FileNotFoundError, NotADirectoryError, PermissionError)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run guarded, and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    tolerate()
    parser = _parser()
    at = args.index("--") if "--" in args else len(args)
    own, command = parser.parse_args(args[:at]), args[at + 1 :]
    if not command:
        parser.error("a command must follow --, such as: -- python train.py")

    def run(guard: int | None) -> int:
        try:
            config = WatchConfig(**{f.name: getattr(own, f.name) for f in fields(WatchConfig)})

            return supervise(
                command,
                own.nproc,
                config=config,
                folder=own.heartbeats,
                journal=own.journal,
                expects_heartbeats=own.expect_heartbeats,
                grace_seconds=own.grace_seconds,
                guard=guard,
            ).code
        except (ValueError, *_WRONG_COMMAND) as error:
            return _print_problems(error)
        except OSError as error:  # it may pass, such as a full disk: 78 would be the end of the job
            return _print_problems(error, ExitCode.ERROR)

    return run_guarded(run, own.grace_seconds)


def _print_problems(error: Exception, code: ExitCode = ExitCode.CONFIG_ERROR) -> int:
    for line in str(error).splitlines():
        print(f"supervise: {line}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SystemExit(_print_problems(ValueError(f"{message}; --help lists the options")))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "python -m forge_resilience.supervise",
        usage="%(prog)s [options] -- COMMAND ...",
        description="Start COMMAND, watch its ranks by their heartbeats, and start them again on this node.",
        epilog="exit codes: that of the ranks; 1 after a hang or an error of this host, 70 after two attempts without "
        "progress, 78 for a wrong option or command; a stop signal is handed on and never leads to a restart",
    )
    add = parser.add_argument
    add("--nproc", type=int, help="start N ranks (of this node, under srun); else COMMAND once")

    own: dict[str, dict[str, Any]] = {
        "limits": {"type": _limits, "default": {}, "metavar": "PHASE=SECONDS,..."},
        "action": {"choices": ["off", "report", "restart"], "default": "restart"},
    }
    for field in fields(WatchConfig):
        options = {"type": type(field.default), "default": field.default}
        add(f"--{field.name}", help=field.metadata["help"], **own.get(field.name, options))

    text = "an events.jsonl that gets hang, restart, no_progress"
    add("--journal", metavar="FILE", help=text)
    add("--heartbeats", metavar="DIR", help="folder of the heartbeats, on this host")
    text = "COMMAND writes them: without any it is late in its start"
    add("--expect_heartbeats", action="store_true", help=text)
    text = "from SIGTERM to SIGKILL, when a rank has failed; none follows a stop signal that is handed on, as ranks may save"
    add("--grace_seconds", type=float, default=10.0, help=text)
    return parser


def _limits(text: str) -> dict[str, float]:
    """Parse PHASE=SECONDS,..."""
    with contextlib.suppress(ValueError):
        pairs = [part.split("=") for part in text.split(",")]
        limits = {phase: float(seconds) for phase, seconds in pairs}
        if len(limits) == len(pairs):
            return limits
    rule = "must read like save=900,step=60, each phase once"
    raise argparse.ArgumentTypeError(f"{text!r} {rule}")


if __name__ == "__main__":
    sys.exit(main())

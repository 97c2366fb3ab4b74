"""Command lines: what a verb of this or another distribution needs to read its arguments.

    def report(args: list[str]) -> int:           # mounted by [project.entry-points."forge.commands"]
        return call_verb(write_report, args, "report")

Nothing here imports torch. Errors are ConfigErrors, which `forge_train.cli` prints.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tyro

from forge_ckpt.cli import path_flags
from forge_resilience.rank_process import is_rank_of_many
from forge_train._shared.problems import Problem, invalid
from forge_train.errors import ConfigError

__all__ = [
    "call_verb", "flag_errors", "is_rank_of_many", "parse_arguments", "take_nproc", "warn_renamed",
    "with_new_names",
]  # fmt: skip

#: While it is active, flags of type Path take a leading `~/` as the home folder.
PATHS = path_flags()


def take_nproc(args: list[str]) -> tuple[int | None, list[str]]:
    """`--nproc N` or `--nproc=N`, and the other arguments."""
    rest = list(args)
    for i, arg in enumerate(rest):
        name, equals, value = arg.partition("=")
        if name != "--nproc":
            continue
        value = value if equals else "".join(rest[i + 1 : i + 2])
        del rest[i : i + (1 if equals else 2)]
        if not value.isdecimal() or int(value) < 1:
            rule, fix = "must be a number of processes", "use --nproc 2"
            raise invalid("--nproc", "range", value, rule, fix, kind=ConfigError)
        if is_rank_of_many():
            rule = "starts processes, but a launcher started this process as one of several"
            raise invalid("--nproc", "launcher", value, rule, "leave it out", kind=ConfigError)
        return int(value), rest
    return None, rest


def with_new_names(args: list[str], verb: str, names: Mapping[str, str]) -> list[str]:
    """Arguments with the flags of before 0.2.0 replaced, `{"--old": "--new"}`, with a warning on stderr. They go in 0.3.0."""
    found = []
    for arg in args:
        name, equals, value = arg.partition("=")
        if name in names:
            warn_renamed(f"{verb} {name}", f"{verb} {names[name]}")
        found.append(names.get(name, name) + equals + value)
    return found


def warn_renamed(old: str, new: str) -> None:
    """Say on stderr that a spelling goes in 0.3.0."""
    print(f"forge-train: {old} is {new} now", file=sys.stderr)


def call_verb(
    function: Callable[..., int], args: list[str], verb: str, description: str | None = None
) -> int:
    """Call a function with arguments of the command line: they are parsed first, so that it prints on its own."""

    @functools.wraps(function)
    def bind(*given: Any, **named: Any) -> Callable[[], int]:
        return functools.partial(function, *given, **named)

    return int(parse_arguments(bind, args, verb, description)())


def parse_arguments(kind: Any, args: list[str], verb: str, description: str | None) -> Any:
    """The arguments of a verb as a dataclass `kind`, or what a function makes of them."""
    of: dict[str, Any] = {"prog": f"forge-train {verb}", "description": description, "args": args}
    with flag_errors(), PATHS:
        return tyro.cli(kind, use_underscores=True, config=(tyro.conf.FlagCreatePairsOff,), **of)


@contextlib.contextmanager
def flag_errors() -> Iterator[None]:
    """A bad flag as a ConfigError, `printed` as the parser printed it."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            yield
    except SystemExit as stop:
        if not stop.code:
            raise
        printed, errors = errors.getvalue(), io.StringIO()
        text = re.sub(r"\x1b\[[0-9;]*m|[\s╭╮╰╯─│]+", " ", printed).strip()
        flag = re.search(r"--(?!help)\w[\w.-]*", text)
        error = ConfigError([Problem(flag[0] if flag else "", "flag", ..., text)])
        error.printed = printed
        raise error from stop
    finally:
        sys.stderr.write(errors.getvalue())

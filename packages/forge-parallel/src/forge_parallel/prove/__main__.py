"""Does a model train the same numbers in every layout as in one process?

    python -m forge_parallel.prove my_lab.model:build
    python -m forge_parallel.prove my_lab.model:build --roles roles.toml --args layers=2 width=32
    python -m forge_parallel.prove my_lab.model:build --blocks "encoder.layer.*" "decoder.layer.*"
    python -m forge_parallel.prove my_lab.model:build --device cuda --precision bf16
    python -m forge_parallel.prove my_lab.model:build --nproc 8 --layout tp=2 pp=2 --layout tp=4 compile=true

roles.toml:

    [roles]
    "*.up.*" = "colwise"
    "*.q_proj.*" = { role = "colwise", multiple_of = 64 }

Leaves with 0 if every cell is green or refused, 1 if one is red, 2 if it cannot be run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from forge_parallel._shared.problems import invalid
from forge_parallel.prove.cells import layout_name
from forge_parallel.prove.prove import Result, prove
from forge_parallel.prove.settings import PRECISIONS, ProveError


def run(argv: list[str] | None = None) -> list[Result]:
    """The printed results. Raises ProveError as `prove`, and for flags that cannot be read."""
    options = vars(_parser().parse_args(argv))
    sys.path.insert(0, os.getcwd())
    layouts = [_layout(words) for words in options.pop("layout")]
    width = max([26, *(len(layout_name(layout)) + 2 for layout in layouts)])
    return prove(
        options.pop("build"),
        args=_pairs(options.pop("args"), "--args", "layers=2"),
        roles=_roles(options.pop("roles")),
        layouts=layouts,
        worlds=_worlds(options.pop("world")),
        header=partial(_print_header, width),
        report=partial(_print, width),
        **options,  # the others are named as in prove
    )


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    try:
        results = run(argv)
    except ValueError as error:
        print(f"cannot be run: {error}".rstrip(), file=sys.stderr)
        return 2
    count = Counter(result.verdict for result in results)
    print(", ".join(f"{count[v]} {v}" for v in ("green", "red", "refused") if count[v]))
    return int(count["red"] > 0)


def _print_header(width: int, line: str) -> None:
    print(line)
    print(
        f"{'cell':{width}}{'ranks':>5}  {'verdict':8} {'worst error':>11} {'seconds':>8}",
        flush=True,
    )


def _print(width: int, result: Result) -> None:
    worst = f"{result.worst:.1e}" if result.errors else ""
    print(
        f"{result.cell:{width}}{result.world:5}  {result.verdict:8} {worst:>11} {result.seconds:8.1f}"
    )
    for line in [*result.message.splitlines(), *result.trace.splitlines()]:
        print(f"    {line}")
    if result.parameter is not None:
        print(f"    parameter {result.parameter}, layer {result.layer}")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m forge_parallel.prove", description=__doc__, formatter_class=style
    )
    parser.add_argument("build", help="module:function that returns the model, a small one")
    parser.add_argument("--args", nargs="*", default=[], metavar="key=value", help="given to build")
    parser.add_argument(
        "--blocks",
        nargs="*",
        metavar="pattern",
        help="names of the blocks, a * between two dots for any",
    )
    parser.add_argument(
        "--media", metavar="module:function", help="of tokens, gives further inputs by name"
    )
    parser.add_argument("--roles", type=Path, help="TOML file with a table [roles]")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each rank (cpu)"
    )
    parser.add_argument("--nproc", type=int, help="the most ranks of a cell (the GPUs there are)")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="fp32", help="of the layouts (fp32)"
    )
    parser.add_argument(
        "--layout",
        nargs="+",
        action="append",
        default=[],
        metavar="key=value",
        help="a layout of your own on nproc ranks instead of the cells: keys of ParallelConfig, micro_batches",
    )
    parser.add_argument("--world", help="numbers of ranks (2,4; with --nproc 1 to nproc)")
    for name, default, says in (
        ("only", "", "cells whose name contains this"),
        ("vocab_size", 64, "token ids are below it"),
        ("seq_len", 16, "tokens of a row"),
        ("seed", 0, "of the builder and the tokens"),
    ):
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help=f"{says} ({default})"
        )
    parser.add_argument("--bound", type=float, help="on every error (those of the precision)")
    parser.add_argument("--timeout", type=float, help="seconds for a cell (60, on GPUs 300)")
    return parser


def _worlds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(world) for world in text.split(",")]
    except ValueError as error:
        rule = "must be numbers with commas"
        raise invalid("--world", "type", text, rule, "write 2,4", kind=ProveError) from error


def _layout(words: list[str]) -> dict[str, Any]:
    return _pairs(" ".join(words).replace(",", " ").split(), "--layout", "tp=2")


def _pairs(words: list[str], flag: str, example: str) -> dict[str, Any]:
    pairs = [_pair(word, flag, example) for word in words]
    if twice := [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]:
        rule, fix = "must be given once", "leave out all but one"
        raise invalid(f"{flag} {twice[0]}", "duplicate", ..., rule, fix, kind=ProveError)
    return dict(pairs)


def _pair(text: str, flag: str, example: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise invalid(
            flag, "syntax", text, "must be key=value", f"write {example}", kind=ProveError
        )
    try:
        return key, tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        return key, value  # a string without quotes


def _roles(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        rule = f"must be a TOML file ({error})"
        raise invalid("--roles", "toml", str(path), rule, "correct it", kind=ProveError) from error
    if set(table) != {"roles"} or not isinstance(table["roles"], dict):
        rule, fix = "must hold one table [roles]", "write [roles] first"
        raise invalid("--roles", "table", str(path), rule, fix, kind=ProveError)
    return table["roles"]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)

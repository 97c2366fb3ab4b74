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

Exit code 0 if every cell is green or refused, 1 if one is red, 2 if the proof cannot be run.
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

from forge_parallel.prove.cells import layout_name
from forge_parallel.prove.prove import Result, prove
from forge_parallel.prove.settings import PRECISIONS, prove_error


def run(argv: list[str] | None = None) -> list[Result]:
    """Prove as the flags say, print each result, and return them. Raises ProveError for invalid flags too."""
    options = vars(_parser().parse_args(argv))
    sys.path.insert(0, os.getcwd())
    layouts = [
        _pairs(" ".join(words).replace(",", " ").split(), "--layout", "tp=2")
        for words in options.pop("layout")
    ]

    # longer names of the caller's layouts widen the first column
    width = max([26, *(len(layout_name(layout)) + 2 for layout in layouts)])
    return prove(
        options.pop("build"),
        args=_pairs(options.pop("args"), "--args", "layers=2"),
        roles=_roles(options.pop("roles")),
        layouts=layouts,
        worlds=_worlds(options.pop("world")),
        header=partial(_print_header, width),
        report=partial(_print, width),
        **options,  # every other flag has the name of prove's argument
    )


def main(argv: list[str] | None = None) -> int:
    """Prove as the flags say, print the counts of verdicts, and return the exit code."""
    try:
        results = run(argv)
    except ValueError as error:
        print(f"cannot be run: {error}".rstrip(), file=sys.stderr)
        return 2
    count = Counter(result.verdict for result in results)
    print(", ".join(f"{count[v]} {v}" for v in ("green", "red", "refused") if count[v]))
    return int(count["red"] > 0)


def _print_header(width: int, line: str) -> None:
    head = f"{'cell':{width}}{'ranks':>5}  {'verdict':8} {'worst error':>11} {'seconds':>8}"
    print(f"{line}\n{head}", flush=True)


def _print(width: int, result: Result) -> None:
    worst = f"{result.worst:.1e}" if result.errors else ""
    verdict = f"{result.verdict:8} {worst:>11} {result.seconds:8.1f}"
    print(f"{result.cell:{width}}{result.world:5}  {verdict}")
    for line in [*result.message.splitlines(), *result.trace.splitlines()]:
        print(f"    {line}")
    if result.parameter is not None:
        print(f"    parameter {result.parameter}, layer {result.layer}")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m forge_parallel.prove",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("build", help="module:function that returns the model, a small one")
    add("--args", nargs="*", default=[], metavar="key=value", help="arguments of build")
    blocks = "names of the blocks, with * for any name between two dots"
    add("--blocks", nargs="*", metavar="pattern", help=blocks)
    media = "function of the tokens that returns further inputs by name"
    add("--media", metavar="module:function", help=media)
    add("--roles", type=Path, help="TOML file with a table [roles]")

    device = "cuda: a GPU for each rank (cpu)"
    add("--device", choices=("cpu", "cuda"), default="cpu", help=device)
    add("--nproc", type=int, help="the most ranks of a cell (the GPUs there are)")
    add("--precision", choices=PRECISIONS, default="fp32", help="of the layouts (fp32)")

    layout = "a layout instead of the cells, on nproc ranks: keys of ParallelConfig, micro_batches"
    add("--layout", nargs="+", action="append", default=[], metavar="key=value", help=layout)
    add("--world", help="numbers of ranks (2,4; with --nproc 1 to nproc)")

    for name, default, text in (
        ("only", "", "cells whose name contains this"),
        ("seq_len", 16, "tokens of a sequence"),
        ("seed", 0, "of the builder and the tokens"),
    ):
        add(f"--{name}", type=type(default), default=default, help=f"{text} ({default})")
    add("--vocab_size", type=int, help="token ids are below it (the width of the logits)")
    tolerance = "bound on every error (those of the precision)"
    add("--tolerance", "--bound", dest="tolerance", type=float, help=tolerance)
    add("--timeout", type=float, help="seconds of a cell (60, on GPUs 300)")
    return parser


def _worlds(text: str | None) -> list[int] | None:
    """Numbers of ranks of `--world`. Raises ProveError for another syntax."""
    try:
        return None if text is None else [int(world) for world in text.split(",")]
    except ValueError as error:
        rule = "must be numbers with commas"
        raise prove_error("--world", "type", text, rule, "write 2,4") from error


def _pairs(words: list[str], flag: str, example: str) -> dict[str, Any]:
    """The words `key=value` as a dictionary, values in the syntax of TOML; a text needs no quotes."""
    pairs: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise prove_error(flag, "syntax", word, "must be key=value", f"write {example}")
        if key in pairs:
            rule, fix = "must be given once", "leave out all but one"
            raise prove_error(f"{flag} {key}", "duplicate", ..., rule, fix)
        try:
            pairs[key] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            pairs[key] = value
    return pairs


def _roles(path: Path | None) -> dict[str, Any] | None:
    """Table [roles] of a TOML file. Raises ProveError without one."""
    if path is None:
        return None
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        rule = f"must be a TOML file ({error})"
        raise prove_error("--roles", "toml", str(path), rule, "correct it") from error
    if set(table) != {"roles"} or not isinstance(table["roles"], dict):
        rule, fix = "must hold one table [roles]", "write [roles] first"
        raise prove_error("--roles", "table", str(path), rule, fix)
    return table["roles"]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)

"""The cells of the equivalence matrix on the null GPU: each reaches its end, and asks of it what it asked before.

    python -m tests.null_gpu matrix                   # the smoke cells against docs/data/null-gpu-matrix.json
    python -m tests.null_gpu matrix --all --only pp_  # of all cells those whose name contains this
    python -m tests.null_gpu matrix --write           # the table and its page anew; with --only those cells, the rest stays

Nothing is compared with a reference, as kernels compute nothing. Of each cell the step of the runner is made on its
ranks, with NCCL, and once more on CPUs with gloo: collectives by kind must be the same, and kernels those of the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tests.null_gpu import device

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs/data/null-gpu-matrix.json"
PAGE = ROOT / "docs/null-gpu-matrix.md"
NPROC = 12  # of the widest layout
SECONDS = 300.0
sys.path.insert(0, str(ROOT / "tests/equivalence"))

# By feature: what a cell needs that no kernel has computed.
NEEDS_NUMBERS = dict.fromkeys(
    ("image_experts", "image_experts_recompute", "picture_experts"),
    "rows are split by how many each expert was given, and the device says 0 of every number",
)


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    if args.measure:
        return _measure(args.measure, args.names)
    names, left = _names(args)
    if not names:
        print(f"no cell to run has {args.only!r} in its name")
        return 1
    for name, why in left.items():
        print(f"not run: {name}: {why}")
    table = _table()
    if not args.write and table.get("torch") != torch.__version__:
        print(f"the table is of torch {table.get('torch')}, and this is {torch.__version__}")
        return 1
    kept = {row["cell"]: row for row in table["cells"]}
    on_null, on_gloo = _both(names)
    wrong = 0
    for name in names:
        row, problems = _row(name, on_null.get(name), on_gloo.get(name))
        if not args.write and not problems:
            problems = _against(row, kept.get(name))
        wrong += bool(problems)
        print(f"{name}: {'; '.join(problems) or 'ok'}")
        if not problems:
            kept[name] = row
    if args.write:
        _write(kept)
    return bool(wrong)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="null_gpu matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="all cells, not only those of the tests")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cells whose names contain it; may be repeated")  # fmt: skip
    parser.add_argument("--write", action="store_true", help="make the table and its page")
    parser.add_argument("--measure", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.write and args.all:
        parser.error("--write goes without --all: it keeps the smoke cells")
    return args


def _names(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Of cells to run; of those that are not, why."""
    from cells import CELLS, FEATURES, SMOKE

    only = args.only or [""]
    cells = [c for c in (CELLS if args.all else SMOKE) if any(text in c.name for text in only)]
    left = {c.name: NEEDS_NUMBERS[c.feature] for c in cells if c.feature in NEEDS_NUMBERS}
    left |= {c.name: why for c in cells if (why := FEATURES[c.feature].only_on_cpus)}
    return [c.name for c in cells if c.name not in left], left


def _both(names: list[str]) -> list[dict[str, Any]]:
    """By cell the counts of its ranks, or an error: on the null GPU and on CPUs, at the same time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda kind: _in_a_process(kind, names), ("cuda", "cpu")))


def _in_a_process(kind: str, names: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = ["-m", "tests.null_gpu.matrix", "--measure", kind, str(out), *names]
        limit = 60 + SECONDS * len(names)
        if kind == "cuda":
            done = device.run(command, devices=NPROC, cwd=ROOT, timeout=limit)
        else:
            whole = [sys.executable, *command]
            done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=limit)
        if done.returncode:
            raise RuntimeError(f"cells on {kind}:\n{done.stdout}{done.stderr}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _measure(kind: str, given: list[str]) -> int:
    """In a process on the null GPU, or on CPUs: run the cells and write what their ranks counted."""
    from cells import CELLS, LAYOUTS
    from tests.null_gpu.matrix import count_cell

    from forge_testing import RankError, choose, run_on_ranks

    choose(kind, NPROC if kind == "cuda" else None)
    out, *names = given
    found: dict[str, Any] = {}
    for cell in (cell for cell in CELLS if cell.name in names):
        # Twice: memory that a rank has received before is read back as if a kernel had written it, an index, say. Ranks
        # that failed are followed by new ones.
        for _ in range(2):
            try:
                ranks = run_on_ranks(LAYOUTS[cell.layout].world, count_cell, cell, timeout=SECONDS)
                found[cell.name] = ranks
                break
            except RankError as error:
                found[cell.name] = str(error)
    Path(out).write_text(json.dumps(found))
    return 0


def count_cell(cell: Any) -> Counter[str]:
    """On a rank: what the steps of a cell ask for, without the making of its model and groups."""
    from batches import batches
    from candidate import Side, train
    from settings import set_up
    from tests.null_gpu.counted import count

    set_up(tf32=False)
    side, data = Side(cell), batches(cell)
    return count(lambda: train(side, data))


def _row(name: str, null: Any, gloo: Any) -> tuple[dict[str, Any], list[str]]:
    """Of all ranks together: collectives, and what the device was asked for. And what is wrong with it."""
    for where, found in (("the null GPU", null), ("CPUs", gloo)):
        if isinstance(found, str):
            return {"cell": name}, [f"did not reach its end on {where}:\n{found}"]
    totals = sum((Counter(rank) for rank in null), Counter[str]())
    wanted = sum((Counter(rank) for rank in gloo), Counter[str]())
    mine = {kind: n for kind, n in sorted(totals.items()) if kind.startswith("c10d.")}
    theirs = {kind: n for kind, n in sorted(wanted.items()) if kind.startswith("c10d.")}
    rest = {kind: n for kind, n in sorted(totals.items()) if kind not in mine}
    problems = [f"collectives {mine}, and with gloo {theirs}"] if mine != theirs else []
    if not rest.get("launch"):
        problems.append("no kernel was launched")
    return {"cell": name, "ranks": len(null), "collectives": mine, "device": rest}, problems


def _against(row: dict[str, Any], kept: dict[str, Any] | None) -> list[str]:
    if kept is None:
        return ["lacks a row; add it with --write"]
    return [
        f"{part} {row[part]}, kept {kept[part]}"
        for part in ("ranks", "collectives", "device")
        if row[part] != kept[part]
    ]


def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text()) if TABLE.exists() else {"cells": []}
    return found


def _write(rows: Mapping[str, dict[str, Any]]) -> None:
    """The smoke cells, a cell a line, so that a change of one is a change of one line; and the page."""
    names, left = _names(_arguments([]))
    left |= {name: "not measured yet" for name in names if name not in rows}
    lines = ",\n".join(f"  {json.dumps(rows[name])}" for name in names if name in rows)
    head = f'"torch": "{torch.__version__}", "not_run": {json.dumps(left)}'
    TABLE.write_text(f'{{{head}, "cells": [\n{lines}\n]}}\n')
    PAGE.write_text(page(_table()))


_HEAD = """# The equivalence matrix on the null GPU

Each of these {number} cells ([what they are](equivalence.md)) made its three steps on torch's CUDA build, with NCCL, on up to {world}
ranks that have a [device that computes nothing](null-gpu.md), and reached its end. **No number was compared**: kernels do nothing
there, so every loss is whatever its memory held. What is compared is what the ranks asked for, all of them together:

- collectives, by torch's name of the call, are the same as those of the same cell on CPUs with gloo, compiled code and backward
  passes included
- kernels launched (of torch and of Triton), products given to cuBLAS, and copies between host and device are those of the last run:
  a change of code that changes them changes this table

`hatch run null-gpu matrix` runs the cells against this table, `--write` writes it from what it measured. On GPUs `hatch run matrix
--device cuda` compares the numbers. Torch {torch}.
"""


def page(table: dict[str, Any]) -> str:
    """Markdown of the table, a section a layout."""
    cells: list[dict[str, Any]] = table["cells"]
    head = _HEAD.format(
        number=len(cells),
        world=max((row["ranks"] for row in cells), default=0),
        torch=table["torch"],
    )
    lines = [head, "Not run here:", ""]
    lines += [f"- `{name}`: {why}" for name, why in table["not_run"].items()]
    layout = ""
    for row in cells:
        name, _, rest = row["cell"].partition("/")
        if name != layout:
            layout = name
            ranks = "1 rank" if row["ranks"] == 1 else f"{row['ranks']} ranks"
            lines += ["", f"## `{name}`, {ranks}", "", _TITLES, "|---" * 6 + "|"]
        lines.append(_line(rest, row))
    return "\n".join([*lines, ""])


_TITLES = "| cell | collectives | kernels | products | copies to the device | to the host |"


def _line(name: str, row: dict[str, Any]) -> str:
    seen, calls = row["device"], row["collectives"]
    said = ", ".join(f"{kind.removeprefix('c10d.').strip('_')} {n}" for kind, n in calls.items())
    triton = f" + {seen['launch.triton']} of Triton" if "launch.triton" in seen else ""
    numbers = [f"{seen.get('launch', 0)}{triton}", *(seen.get(kind, 0) for kind in _REST)]
    return f"| {name} | {said or 'none'} | " + " | ".join(map(str, numbers)) + " |"


_REST = ("blas", "copy.host_to_device", "copy.device_to_host")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

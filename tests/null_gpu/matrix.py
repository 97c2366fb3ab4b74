"""The cells of the equivalence matrix on the null GPU: each reaches its end, and asks of it what it asked before.

    python -m tests.null_gpu matrix                   # the smoke cells against docs/null-gpu-matrix.json
    python -m tests.null_gpu matrix --all --only pp_  # of all cells those whose name contains this
    python -m tests.null_gpu matrix --write           # anew: docs/null-gpu-matrix.json and .md

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
from pathlib import Path
from typing import Any

import torch

from tests.null_gpu import device

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs/null-gpu-matrix.json"
NPROC = 12  # of the widest layout
SECONDS = 300.0
sys.path.insert(0, str(ROOT / "tests/equivalence"))

# By feature: what a cell needs that no kernel has computed.
NEEDS_NUMBERS = dict.fromkeys(
    ("image_experts", "image_experts_recompute", "picture_experts"),
    "rows are split by how many each expert was given, and the device says 0 of every number",
)
# Of a kind of collective, by layout: NCCL's count minus gloo's.
BACKENDS_DIFFER: dict[str, str] = {}


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    if args.measure:
        return _measure(args.measure, args.names)
    names, left = _names(args)
    for name, why in left.items():
        print(f"not run: {name}: {why}")
    on_null, on_gloo = _both(names)
    kept = {row["cell"]: row for row in _table()["cells"]}
    rows, wrong = [], 0
    for name in names:
        row, problems = _row(name, on_null.get(name), on_gloo.get(name))
        if not args.write and not problems:
            problems = _against(row, kept.get(name))
        rows.append(row)
        wrong += bool(problems)
        print(f"{name}: {'; '.join(problems) or 'ok'}")
    if args.write and not wrong:
        _write(rows, left)
    return bool(wrong)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="null_gpu matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="all cells, not only those of the tests")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--write", action="store_true", help="make the table and its page")
    parser.add_argument("--measure", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.write and (args.all or args.only):
        parser.error("--write must go alone: the table is of the smoke cells")
    return args


def _names(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Of cells to run; of those that are not, why."""
    from cells import CELLS, FEATURES, SMOKE

    cells = [c for c in (CELLS if args.all else SMOKE) if args.only in c.name]
    left = {c.name: NEEDS_NUMBERS[c.feature] for c in cells if c.feature in NEEDS_NUMBERS}
    left |= {c.name: why for c in cells if (why := FEATURES[c.feature].only_on_cpus)}
    return [c.name for c in cells if c.name not in left], left


def _both(names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """By cell the counts of its ranks, or an error: on the null GPU and on CPUs, in a process each."""
    found = []
    for kind in ("cuda", "cpu"):
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
            found.append(json.loads(out.read_text()))
    return found[0], found[1]


def _measure(kind: str, given: list[str]) -> int:
    """In a process on the null GPU, or on CPUs: run the cells and write what their ranks counted."""
    from cells import CELLS, LAYOUTS

    from forge_testing import RankError, choose, run_on_ranks
    from tests.null_gpu.matrix import count_cell

    choose(kind, NPROC if kind == "cuda" else None)
    out, *names = given
    found: dict[str, Any] = {}
    for cell in (cell for cell in CELLS if cell.name in names):
        try:
            ranks = run_on_ranks(LAYOUTS[cell.layout].world, count_cell, cell, timeout=SECONDS)
            found[cell.name] = ranks
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
        return ["not in the table; add it with --write"]
    return [
        f"{part} {row[part]}, in the table {kept[part]}"
        for part in ("ranks", "collectives", "device")
        if row[part] != kept[part]
    ]


def _table() -> dict[str, Any]:
    if not TABLE.exists():
        return {"torch": torch.__version__, "cells": []}
    found: dict[str, Any] = json.loads(TABLE.read_text())
    return found


def _write(rows: list[dict[str, Any]], left: dict[str, str]) -> None:
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    not_run = json.dumps(left)
    TABLE.write_text(
        f'{{"torch": "{torch.__version__}", "not_run": {not_run}, "cells": [\n{lines}\n]}}\n'
    )
    TABLE.with_suffix(".md").write_text(page(_table()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measure the cells and write them down.

    python tests/equivalence/run_cells.py                    # all: docs/equivalence.json and .md
    python tests/equivalence/run_cells.py --smoke --out /tmp/equivalence.json
    python tests/equivalence/run_cells.py --only bf16        # these anew, the other rows stay

Needs forge_testing, forge_core, forge_parallel, forge_resilience. The page lies beside the JSON file.
Leaves with 1 if a cell is red.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cells import CELLS, SMOKE
from compare import Measured, measure
from page import page

ROOT = Path(__file__).resolve().parents[2]
# What the figures depend on; changes elsewhere do not make a commit another one.
SOURCES = (
    "packages/forge-core/src",
    "packages/forge-parallel/src",
    "packages/forge-resilience/src",
    "tests/equivalence",
    "tests/harness/src",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs/equivalence.json")
    parser.add_argument("--smoke", action="store_true", help="the cells that the tests run")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    args = parser.parse_args()
    cells = [replace(cell, seed=args.seed) for cell in (SMOKE if args.smoke else CELLS)]
    cells = [cell for cell in cells if args.only in cell.name]
    rows = {row["cell"]: row for row in _rows(args.out)} if args.only else {}
    reds, commit = 0, _commit()
    for number, cell in enumerate(cells, 1):
        measured = measure(cell)
        rows[cell.name] = _row(measured, commit)
        reds += bool(measured.red)
        verdict = f"RED {', '.join(measured.red)}" if measured.red else "ok"
        print(f"{number}/{len(cells)} {cell.name}: {verdict}", flush=True)
    order = {cell.name: index for index, cell in enumerate(CELLS)}
    kept = sorted(
        (row for name, row in rows.items() if name in order), key=lambda r: order[r["cell"]]
    )
    # one row a line, so that a change of one cell is a change of one line
    args.out.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    args.out.with_suffix(".md").write_text(page(kept))
    sys.exit(bool(reds))


def _row(measured: Measured, commit: str) -> dict[str, Any]:
    return {
        "cell": measured.cell.name,
        "seed": measured.cell.seed,
        "error": {name: float(f"{value:.2g}") for name, value in measured.errors.items()},
        "bound": measured.cell.bounds,
        "seconds": round(measured.seconds, 2),
        "commit": commit,
        "torch": torch.__version__,
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return rows


def _commit() -> str:
    """Short commit, with a plus sign if the sources were changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", *SOURCES)
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


if __name__ == "__main__":
    main()

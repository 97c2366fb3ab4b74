"""Measure the cells and write them down.

    hatch run matrix                                         # all: docs/equivalence.json and .md
    hatch run matrix --smoke --out /tmp/equivalence.json
    hatch run matrix --only bf16                             # these anew, the other rows stay
    hatch run matrix --resume                                # those that have no row of this commit

Every row is written when it is there, so a campaign that ended can go on. Needs forge_testing,
forge_core, forge_moe, forge_parallel, forge_resilience, forge_vlm. The page lies beside the JSON file. Leaves with 1
if a cell is red, or a combination is not refused as it should be.
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
from refusals import REFUSALS, refused

from forge_testing import RankError

ROOT = Path(__file__).resolve().parents[2]
# What the figures depend on; changes elsewhere do not make a commit another one.
SOURCES = (
    "packages/forge-core/src",
    "packages/forge-moe/src",
    "packages/forge-parallel/src",
    "packages/forge-resilience/src",
    "packages/forge-vlm/src",
    "tests/equivalence",
    "tests/harness/src",
)
ORDER = {name: place for place, name in enumerate([*(c.name for c in CELLS), *REFUSALS])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs/equivalence.json")
    parser.add_argument("--smoke", action="store_true", help="the cells that the tests run")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--resume", action="store_true", help="keep rows of this commit")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    args = parser.parse_args()
    commit, reds = _commit(), 0
    rows = _rows(args.out) if args.only or args.resume else {}
    known = {name for name, row in rows.items() if row["commit"] == commit} if args.resume else ()
    names = [*(cell.name for cell in (SMOKE if args.smoke else CELLS)), *REFUSALS]
    names = [name for name in names if args.only in name and name not in known]
    cells = {cell.name: replace(cell, seed=args.seed) for cell in CELLS}
    for number, name in enumerate(names, 1):
        row, verdict = _measured(cells[name]) if name in cells else _asked(name)
        rows.pop(name, None)
        if row:
            rows[name] = {**row, "commit": commit, "torch": torch.__version__}
        reds += verdict != "ok"
        print(f"{number}/{len(names)} {name}: {verdict}", flush=True)
        _write(args.out, rows)
    sys.exit(bool(reds))


def _measured(cell: Any) -> tuple[dict[str, Any], str]:
    """A cell's row, none where it did not run, and what to say of it."""
    try:
        measured = measure(cell)
    except RankError as error:
        return {}, f"RED, {error}"
    return _row(measured), f"RED {', '.join(measured.red)}" if measured.red else "ok"


def _row(measured: Measured) -> dict[str, Any]:
    return {
        "cell": measured.cell.name,
        "seed": measured.cell.seed,
        "error": {name: float(f"{value:.2g}") for name, value in measured.errors.items()},
        "bound": measured.cell.bounds,
        "seconds": round(measured.seconds, 2),
    }


def _asked(name: str) -> tuple[dict[str, Any], str]:
    said = refused(name)
    verdict = "ok" if said and REFUSALS[name].says in said else f"NOT REFUSED so: {said!r}"
    return {"refused": name, "message": said}, verdict


def _write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """One row a line, so that a change of one cell is a change of one line; and the page."""
    kept = [rows[name] for name in sorted(rows.keys() & ORDER.keys(), key=ORDER.__getitem__)]
    path.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    if any("cell" in row for row in kept):
        path.with_suffix(".md").write_text(page(kept))


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return {row.get("cell") or row["refused"]: row for row in rows}


def _commit() -> str:
    """Short commit, with a plus sign if the sources were changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", *SOURCES)
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


if __name__ == "__main__":
    main()

"""Measure the cells and write them down.

    hatch run matrix                                         # all: docs/equivalence.md, docs/data/equivalence.json
    hatch run matrix --smoke --out /tmp/equivalence.json
    hatch run matrix --only bf16                             # these anew, the other rows stay
    hatch run matrix --resume                                # those that have no row of this commit
    hatch run matrix --device cuda --nproc 8                 # on GPUs with NCCL: docs/equivalence-cuda.md
    hatch run matrix --device cuda --nproc 8 --tf32          # products in TF32: docs/equivalence-cuda-tf32.md

On GPUs cells of more ranks than GPUs are named and not run, refusals are left to the run on CPUs (they are words), and
the reference is one process on the same kind of GPU in fp32. Every row is written when it is there, so a campaign that ended can go on. Needs forge_testing,
forge_core, forge_moe, forge_parallel, forge_resilience, forge_vlm. The page of a JSON file in a
folder `data` is written to the folder above it, else to the same folder. Leaves with 1 if a cell is red, or a combination is not refused as it should be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cells import CELLS, FEATURES, LAYOUTS, SMOKE, Cell
from compare import Measured, measure
from invalid_cells import REJECTIONS, rejection
from page import RANDOM_JOBS, page
from settings import described

from forge_testing import RankError, choose, run_on_ranks
from forge_testing.commits import short_commit
from forge_testing.devices import chosen

ROOT = Path(__file__).resolve().parents[2]
# What the figures depend on; changes elsewhere do not make a commit another one.
_PACKAGES = ("core", "moe", "parallel", "resilience", "vlm")
SOURCES = (
    *(f"packages/forge-{p}/src" for p in _PACKAGES),
    "tests/equivalence",
    "tests/harness/src",
)
ORDER = {name: place for place, name in enumerate([*(c.name for c in CELLS), *REJECTIONS])}


def main() -> None:
    args = arguments(sys.argv[1:])
    commit, reds = short_commit(ROOT, SOURCES), 0
    common = {"commit": commit, "torch": torch.__version__, **_device_of_rows(args)}
    rows = _rows(args.out) if args.only or args.resume else {}
    known = {name for name, row in rows.items() if row["commit"] == commit} if args.resume else ()
    names, left = chosen_names(args)
    for name, why in left.items():
        print(f"not run: {name}: {why}")
    names = [name for name in names if name not in known]
    cells = {cell.name: replace(cell, seed=args.seed, tf32=args.tf32) for cell in CELLS}
    for number, name in enumerate(names, 1):
        row, verdict = _measured(cells[name]) if name in cells else _asked(name)
        rows.pop(name, None)
        if row:
            rows[name] = {**row, **common}
        reds += verdict != "ok"
        print(f"{number}/{len(names)} {name}: {verdict}", flush=True)
        _write(args.out, rows)
    sys.exit(bool(reds))


def arguments(given: list[str]) -> argparse.Namespace:
    """Checked, and the ranks' device chosen; leaves with one line where they do not go together."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON of the rows")
    parser.add_argument("--smoke", action="store_true", help="the cells that the tests run")
    parser.add_argument("--only", default="", help="cells named so")
    parser.add_argument("--resume", action="store_true", help="keep rows of this commit")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--nproc", type=int, help="GPUs (default: all)")
    parser.add_argument("--tf32", action="store_true", help="fp32 cells, with products in TF32")
    args = parser.parse_args(given)
    if args.tf32 and args.device == "cpu":
        parser.error("--tf32 must go with --device cuda: products on a CPU are in fp32")
    try:
        choose(args.device, args.nproc)
    except ValueError as error:
        parser.error(str(error))
    if not any(chosen_names(args)):
        parser.error(f"--only {args.only!r} names no cell")
    kind = "-cuda-tf32" if args.tf32 else "-cuda" if args.device == "cuda" else ""
    args.out = args.out or ROOT / f"docs/data/equivalence{kind}.json"
    for row in _rows(args.out).values():
        if ("device" in row, row.get("tf32", False)) != (args.device == "cuda", args.tf32):
            kind = f"{row.get('device', 'CPUs')}{' in TF32' if row.get('tf32') else ''}"
            parser.error(f"--out {args.out} holds rows of {kind}; name another file")
    return args


def chosen_names(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Of what is run; and of cells that cannot be, why."""
    cells = [cell for cell in (SMOKE if args.smoke else CELLS) if args.only in cell.name]
    if args.tf32:
        cells = [cell for cell in cells if not FEATURES[cell.feature].bf16]
    device, nproc = chosen()
    left: dict[str, str] = {}
    if device == "cuda":
        left = {c.name: f"needs {_world(c)} GPUs" for c in cells if _world(c) > (nproc or 0)}
        left |= {c.name: why for c in cells if (why := FEATURES[c.feature].only_on_cpus)}
    names = [cell.name for cell in cells if cell.name not in left]
    if device == "cpu":
        names += [name for name in REJECTIONS if args.only in name]
    return names, left


def _world(cell: Cell) -> int:
    return LAYOUTS[cell.layout].world


def _device_of_rows(args: argparse.Namespace) -> Mapping[str, Any]:
    """What rows of GPUs say of them; printed, too. Rows of CPUs say nothing."""
    if args.device == "cpu":
        return {}
    (found,) = run_on_ranks(1, described, args.tf32)
    print(f"{found['device']}: {found['settings']}", flush=True)
    return {**found, "tf32": args.tf32}


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
    key, code, text = rejection(name)
    verdict = (
        "ok" if (key, code) == REJECTIONS[name].problem else f"REJECTED by {(key, code)}: {text}"
    )
    return {"refused": name, "key": key, "code": code, "message": text}, verdict


def _write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """One row a line, so that a change of one cell is a change of one line; and the page."""
    kept = [rows[name] for name in sorted(rows.keys() & ORDER.keys(), key=ORDER.__getitem__)]
    path.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    if any("cell" in row for row in kept):
        folder = path.parents[1] if path.parent.name == "data" else path.parent
        written = folder / f"{path.stem}.md"
        before = written.read_text() if written.exists() else ""
        written.write_text(page(kept, path.name) + "".join(before.partition(RANDOM_JOBS)[1:]))


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return {row.get("cell") or row["refused"]: row for row in rows}


if __name__ == "__main__":
    main()

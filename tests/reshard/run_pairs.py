"""Save in each layout, load and train on in each other, and write it down.

    hatch run reshard                                        # all: docs/reshard.md, docs/data/reshard.json
    hatch run reshard --ring --out /tmp/reshard.json         # each layout once saved, once loaded
    hatch run reshard --resume                               # those that have no row of this commit

Every row is written when it is there, so a campaign that ended can go on. The page of a JSON file in a
folder `data` is written to the folder above it, else to the same folder. Leaves with 1 if a pair is red.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from forge_testing.commits import short_commit

from .page import page
from .pairs import LAYOUTS, PAIRS, RING, Measured, Run, bounds, pair, run

ROOT = Path(__file__).resolve().parents[2]
# What the figures depend on; changes elsewhere do not make a commit another one.
SOURCES = ("packages", "apps/train/src", "tests/reshard", "tests/harness/src")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs/data/reshard.json")
    parser.add_argument("--ring", action="store_true", help="the pairs that the tests run")
    parser.add_argument("--resume", action="store_true", help="keep rows of this commit")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    args = parser.parse_args()
    commit, reds = short_commit(ROOT, SOURCES), 0
    rows = _rows(args.out) if args.resume else {}
    rows = {name: row for name, row in rows.items() if row["commit"] == commit}
    with tempfile.TemporaryDirectory() as name:
        folder, runs = Path(name), dict[str, Run]()
        wanted = [p for p in (RING if args.ring else PAIRS) if " -> ".join(p) not in rows]
        for number, (first, then) in enumerate(wanted, 1):
            if first not in runs:
                (folder / first).mkdir()
                runs[first] = run(folder / first, first, args.seed)
            (folder / f"{first} {then}").mkdir()
            measured = pair(folder / f"{first} {then}", runs[first], (first, then), args.seed)
            rows[measured.name] = {**_row(measured), "commit": commit, "torch": torch.__version__}
            reds += bool(measured.red)
            verdict = f"RED {', '.join(measured.red)}" if measured.red else "ok"
            print(f"{number}/{len(wanted)} {measured.name}: {verdict}", flush=True)
            _write(args.out, rows)
    sys.exit(bool(reds))


def _row(measured: Measured) -> dict[str, Any]:
    return {
        "pair": measured.name,
        "seed": measured.seed,
        "error": {name: float(f"{value:.2g}") for name, value in measured.error.items()},
        "bound": bounds(),
        "seconds": round(measured.seconds, 2),
    }


def _write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """One row a line, so that a change of one pair is a change of one line; and the page."""
    order = [" -> ".join(names) for names in PAIRS]
    kept = [rows[name] for name in order if name in rows]
    path.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    folder = path.parents[1] if path.parent.name == "data" else path.parent
    (folder / f"{path.stem}.md").write_text(page(kept, LAYOUTS))


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return {row["pair"]: row for row in rows}


if __name__ == "__main__":
    main()

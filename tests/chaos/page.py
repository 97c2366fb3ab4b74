"""Write docs/reliability.md and docs/data/reliability.json from the rows of a campaign.

    python -m tests.chaos.page runs/chaos.jsonl      # adds its rows to reliability.json, and writes the page

The JSON holds a cell for each suite, kind, phase and seed: which faults of the schedule struck (their numbers and
the seed give all that was drawn), the worst recovery, and the faults that failed.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forge_resilience.chaos import failure_rate_bound

from .found import FOUND
from .suites import SUITES

DOCS = Path(__file__).resolve().parents[2] / "docs"
_KEY = ("suite", "kind", "phase", "campaign_seed")
_HEAD = """# Reliability

Faults injected into real runs of forge-train: processes, signals, files, disks, on {ranks} gloo ranks. After each
one: the run goes on or ends with the documented exit code, within a minute; no process is left behind; no
traceback without a line that names the cause; the newest checkpoint verifies, and its bytes are those of the
undisturbed run at that step; no more than the save under way is lost, and nothing by a stop on request. Every dozen
faults the run is finished, and its rows (loss, gradient norm, digest of the instances) and last checkpoint equal
those of the undisturbed run bit by bit; after a change of the number of ranks weights to 1e-5 and instances exactly.
What failed was fixed (Found, below) and injected again: of each fault the last injection counts.

**{faults} faults, {failures} failures{open}.** With no failure in n faults the rate lies below 3 / n (95 %): here below
{bound:.2g}. Seeds: {seeds}. Commits: {commits}. A strike counts only if it hit the named phase: the rank is stopped, its
heartbeat read again, and only then the fault is injected. Recovery is the time from the fault until the next life is
beyond the step of the fault, on two shared cores; launcher and ranks are forks of a process that has imported torch, so a
start costs tenths of a second. Suite srun starts its ranks by the srun of a real Slurm, imports and all: some ten
seconds a life; its codes are those that our batch script reads.

This page is written by `python -m tests.chaos.page` from `reliability.json`; `hatch run chaos --campaign` makes the
rows, and goes on where it stopped.

"""


def merge(
    cells: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Cells with further rows in them. A fault that was run again replaces its earlier result."""
    found = {tuple(cell[name] for name in _KEY): dict(cell) for cell in cells}
    last = {(*(row[name] for name in _KEY), row["number"]): row for row in rows}
    for (*where, number), row in last.items():
        key = tuple(where)
        empty = {
            "numbers": [],
            "worst_seconds": 0.0,
            "worst_number": None,
            "failed": {},
            "commits": [],
        }
        cell = found.setdefault(key, {**dict(zip(_KEY, key)), **empty})
        cell["numbers"] = sorted({*cell["numbers"], number})
        cell["commits"] = sorted({*cell["commits"], row["commit"]})
        cell["failed"].pop(str(number), None)
        if row["problem"]:
            cell["failed"][str(number)] = row["problem"].splitlines()[0][:200]
        elif (row["recovery_seconds"] or 0.0) > cell["worst_seconds"]:
            cell["worst_seconds"], cell["worst_number"] = row["recovery_seconds"], number
    return [found[key] for key in sorted(found)]


def page(cells: list[dict[str, Any]]) -> str:
    """Markdown of all cells: a table of kinds, what was found, and what is open."""
    faults = sum(len(cell["numbers"]) for cell in cells)
    failures = sum(len(cell["failed"]) for cell in cells)
    text = _HEAD.format(
        ranks=" or ".join(map(str, sorted({n for suite in SUITES.values() for n in suite.nproc}))),
        faults=faults,
        failures=failures,
        open="" if not failures else " (below)",
        bound=failure_rate_bound(failures, faults),
        seeds=_distinct(cell["campaign_seed"] for cell in cells),
        commits=_distinct(commit for cell in cells for commit in cell["commits"]),
    )
    by_kind: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        by_kind[cell["suite"], cell["kind"]].append(cell)
    lines = ["| suite | kind | faults | in phase | rate below | worst recovery (s) | failures |", "|---|---|---:|---|---:|---:|---:|"]  # fmt: skip
    for (suite, kind), group in by_kind.items():
        count = sum(len(cell["numbers"]) for cell in group)
        failed = sum(len(cell["failed"]) for cell in group)
        phases = ", ".join(f"{cell['phase']} {len(cell['numbers'])}" for cell in group)
        worst = max(cell["worst_seconds"] for cell in group)
        lines.append(f"| {suite} | {kind} | {count} | {phases} | {failure_rate_bound(failed, count):.2g} | {worst:.1f} | {failed} |")  # fmt: skip
    lines += ["", "## Found", "", "| fault | what happened | now | test |", "|---|---|---|---|"]
    lines += [f"| {f.fault} | {f.happened} | {f.now} | `{f.test}` |" for f in FOUND]
    open_failures = [
        f"| {cell['suite']} {number}, seed {cell['campaign_seed']} | {cell['kind']} | {cell['phase']} | {problem} |"
        for cell in cells
        for number, problem in cell["failed"].items()
    ]
    if open_failures:
        lines += ["", "## Open", "", "| fault | kind | phase | problem |", "|---|---|---|---|", *open_failures]  # fmt: skip
    return text + "\n".join(lines) + "\n"


def _distinct(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))


def main() -> None:
    path = DOCS / "data/reliability.json"
    cells = json.loads(path.read_text()) if path.exists() else []
    for name in sys.argv[1:]:
        cells = merge(cells, map(json.loads, Path(name).read_text().splitlines()))
    path.write_text("[\n" + ",\n".join(map(json.dumps, cells)) + "\n]\n")
    (DOCS / "reliability.md").write_text(page(cells))


if __name__ == "__main__":
    main()

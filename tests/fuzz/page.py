"""Counts of campaigns: a line for the console, docs/data/fuzz.json, and its section of docs/equivalence.md.

python -m tests.fuzz.page            # write the section again, from the JSON file
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.fuzz.job import axes

from forge_testing.commits import short_commit

ROOT = Path(__file__).resolve().parents[2]
JSON, PAGE = ROOT / "docs/data/fuzz.json", ROOT / "docs/equivalence.md"
# What the numbers depend on; changes elsewhere do not make a commit another one.
SOURCES = ("packages", "apps/train/src", "tests/fuzz", "tests/harness/src")
BEGIN = "<!-- random jobs: hatch run fuzz --record -->\n"
END = "<!-- end of the random jobs -->\n"  # prose: a mark of the page
#: Of a configuration that was compared; the others were drawn anew.
COMPARED = ("equal", "different", "failed")
KINDS = (*COMPARED, "rejected", "close routes")
Row = Mapping[str, Any]


def summary(rows: Iterable[Row]) -> str:
    """How many jobs there were of each kind."""
    kinds = Counter(row["kind"] for row in rows)
    return ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kinds[kind]) or "no job"


# ---- the JSON file


def record(rows: Sequence[Row], seed: int, seconds: float, path: Path = JSON) -> None:
    """Add a campaign to the file, and write the section of the page."""
    found = read(path)
    kinds = Counter(row["kind"] for row in rows)
    found["campaigns"].append(
        {
            "seed": seed,
            "commit": short_commit(ROOT, SOURCES),
            "torch": torch.__version__,
            "minutes": round(seconds / 60, 1),
            **{kind: kinds[kind] for kind in KINDS},
        }
    )
    _count(found, rows)
    found["differences"] += [_difference(row) for row in rows if row["kind"] in ("different", "failed")]  # fmt: skip
    write(found, path)


def read(path: Path = JSON) -> dict[str, Any]:
    """The counts so far; empty ones without a file."""
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {"campaigns": [], "axes": {}, "pairs": {}, "rejected": [], "differences": []}


def _count(found: dict[str, Any], rows: Iterable[Row]) -> None:
    """Add the jobs to the counts by value, by pair of axes, and of problems."""
    by_axis, pairs = found["axes"], found["pairs"]
    problems = {(p["key"], p["code"]): p["jobs"] for p in found["rejected"]}
    for row in rows:
        if row["kind"] == "rejected":
            problem = tuple(row["problem"])
            problems[problem] = problems.get(problem, 0) + 1
        if row["kind"] not in COMPARED:
            continue
        for name, axis in axes().items():
            value = row["choice"].get(name, next(iter(axis.values)))
            counts = by_axis.setdefault(name, {}).setdefault(value, {})
            counts[row["kind"]] = counts.get(row["kind"], 0) + 1
        for one, other in itertools.combinations([n for n in axes() if n in row["choice"]], 2):
            of_one = pairs.setdefault(one, {})
            of_one[other] = of_one.get(other, 0) + 1
    found["rejected"] = [
        {"key": key, "code": code, "jobs": jobs} for (key, code), jobs in sorted(problems.items())
    ]


def _difference(row: Row) -> dict[str, Any]:
    """A difference as it is recorded. `state` becomes "fixed" or "explained" by hand, with a `note`; one that vanishes
    in float64 is explained at once."""
    return {
        "job": row["job"],
        "against": row["against"],
        "cause": (row["shrunk"] or {}).get("cause", ""),
        "first": row["text"].splitlines()[0][:300],
        "state": "explained" if row["explained"] else "open",
        "note": row["explained"],
    }


def write(found: Mapping[str, Any], path: Path = JSON) -> None:
    """One campaign, axis, problem or difference a line, so that a change of one is a change of one line."""
    parts = []
    for name, value in found.items():
        if isinstance(value, list):
            lines = [json.dumps(item) for item in value]
            parts.append(f"{json.dumps(name)}: [\n" + ",\n".join(lines) + "\n]")
        else:
            lines = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
            parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    if path == JSON:
        PAGE.write_text(with_section(PAGE.read_text(), section(found)))


# ---- the section of the page


def with_section(page: str, text: str) -> str:
    """The page with the section at its end, in place of an older one."""
    before, _, rest = page.partition(BEGIN)
    return f"{before.rstrip()}\n\n{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def section(found: Mapping[str, Any]) -> str:
    """Markdown of the counts."""
    total = Counter[str]()
    for campaign in found["campaigns"]:
        total.update({kind: campaign[kind] for kind in KINDS})
    states = Counter(d["state"] for d in found["differences"])
    compared = sum(total[kind] for kind in COMPARED)
    lines = [
        "## Random jobs",
        "",
        _HEAD.format(
            compared=compared,
            equal=total["equal"],
            fixed=states["fixed"],
            explained=states["explained"],
            open=states["open"],
            rejected=total["rejected"],
            close=total["close routes"],
            seeds=_distinct(str(c["seed"]) for c in found["campaigns"]),
            commits=_distinct(c["commit"] for c in found["campaigns"]),
            torches=_distinct(c["torch"] for c in found["campaigns"]),
            minutes=sum(c["minutes"] for c in found["campaigns"]),
        ),
        "| axis | value: jobs | least pairs |",
        "|---|---|---|",
        *(_axis_line(found, name) for name in axes()),
        "",
    ]
    if found["differences"]:
        lines += ["| difference | cause | state |", "|---|---|---|"]
        lines += [
            f"| {d['job']}: {_cell(d['first'])} | {_cell(d['cause'])} | {d['state']}. {_cell(d['note'])} |"
            for d in found["differences"]
        ]
        lines.append("")
    if found["rejected"]:
        lines += ["| rejected by | code | jobs |", "|---|---|---:|"]
        lines += [f"| `{p['key']}` | `{p['code']}` | {p['jobs']} |" for p in found["rejected"]]
        lines.append("")
    return "\n".join(lines)


_HEAD = """`hatch run fuzz` draws jobs of the runner over the axes below, runs each in its layout on 1 to 6 processes, and compares it with
`tests/fuzz/reference`, a trainer in plain torch that was written from papers and these pages. Sample indices, token counts and
learning rates are the same numbers; losses, gradient norms and final weights are within the bounds of `tests/fuzz/compare.py`.

{compared} jobs: {equal} equal; of the differences {fixed} were fixed, {explained} are rounding, {open} are open. {rejected} more draws were
rejected before the first step, and in {close} an expert was chosen by less than 1e-4 in the first step; both were drawn anew.
A pair of axes counts the jobs in which neither is at its default; the last column has the axes with the fewest.

Seeds {seeds}; commit {commits}, torch {torches}, {minutes:.0f} minutes.
"""


def _axis_line(found: Mapping[str, Any], name: str) -> str:
    """The jobs of each value, and the rarest pairs with other axes."""
    counts = found["axes"].get(name, {})
    values = [f"{value}: {sum(counts.get(value, {}).values())}" for value in axes()[name].values]
    pairs: dict[str, int] = defaultdict(int)
    for other in axes():
        if other != name:
            pairs[other] = found["pairs"].get(name, {}).get(other, 0) + found["pairs"].get(other, {}).get(name, 0)  # fmt: skip
    rare = sorted(pairs.items(), key=lambda pair: pair[1])[:3]
    return f"| {name} | {'; '.join(values)} | {', '.join(f'{other} {n}' for other, n in rare)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


if __name__ == "__main__":
    PAGE.write_text(with_section(PAGE.read_text(), section(read())))

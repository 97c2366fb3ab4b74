"""docs/benchmarks.md from the lines of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT

PAGE = ROOT / "docs/benchmarks.md"
HEAD = """# Benchmarks

Written by `hatch run bench --render FILE` from the lines of `hatch run bench`; do not edit.

A figure is the time of the other side over the time of Forge: the median of interleaved rounds in one process, with its quartiles.
Above 1, Forge is faster. A row passes with a median of at least its bound and a lower quartile of at least 0.03 less. The noise
rows compare Forge with itself, first and last; outside of 0.98 to 1.02 the run is void. Bounds are 1.00; 0.98 where both sides
call the same kernels of torch; none where the other side does less.

"""
REPEAT = """
## Repeat it

```bash
hatch run bench                                          # an hour on two quiet cores; runs/bench.jsonl
hatch run bench --preset h100                            # on a GPU
hatch run bench --rows 'moe*' --peer torchtitan=/src/torchtitan
hatch run bench --growth                                 # exponents, after the rows
hatch run bench --render runs/bench.jsonl                # this page
```

A command downloads nothing. `hatch run bench:suite` runs in an environment with the peers of the index, which hatch makes at its first use;
`--peer NAME=PATH` takes the sources of a peer and `--peer-python PATH` a Python that has it.
"""


def render(path: Path) -> None:
    """Write the page from a file of lines."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    PAGE.write_text(page(lines))


def page(lines: list[dict[str, Any]]) -> str:
    """Markdown of a run's lines."""
    head = next((line for line in lines if "run" in line), None)
    if head is None:
        return HEAD + "It has not been filled: no run on a quiet machine yet.\n" + REPEAT
    rows = [line for line in lines if "row" in line]
    growths = [line for line in lines if "growth" in line]
    return "\n".join(
        [
            HEAD + "\n".join(header(head, rows)),
            *table(rows),
            *own(rows),
            *grown(growths),
            *settings(rows),
            REPEAT,
        ]
    )


def header(head: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[str]:
    e = head["environment"]
    verdicts = [row["verdict"] for row in rows if row["row"].startswith("noise")]
    passed = sum(row["verdict"] == "ahead" for row in rows)
    judged = len(rows) - len(verdicts)
    have = ", ".join(f"{n} {v}" for n, v in head["versions"].items() if v)
    yield f"- Run: {head['run']}, commit {e['commit']}, {e['device_name']}, {e['cpus']} cores, {e['threads']} threads of torch, load before {e['load_before']}"
    yield f"- Versions: torch {e['torch']}, Python {e['python']}, {have}"
    yield "- Not installed: " + (
        ", ".join(n for n, v in head["versions"].items() if not v) or "none"
    )
    yield "- Limits of the machine in this run: " + ", ".join(
        f"{n.replace('_', ' ')} {v:.3g}" for n, v in head["limits"].items()
    )
    yield f"- Noise: {', '.join(verdicts)}. Rows that pass: {passed} of {judged}.\n"


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "## Next to peers\n\n| row | Forge, ms | peer | median [quartiles] | bound | |\n|---|---:|---|---:|---:|---|"
    for row in rows:
        if "error" in row:
            yield f"| {row['row']} | | | | | failed: {row['error'].splitlines()[0][:80]} |"
            continue
        ours = (
            f"{1000 * row['seconds']['forge']['median']:.4g}" if "forge" in row["seconds"] else ""
        )
        for name, r in row["ratios"].items():
            bound, quartiles = (
                row["bounds"][name],
                f"{r['median']:.2f} [{r['q1']:.2f}, {r['q3']:.2f}]",
            )
            shown = "none" if bound is None else f"{bound:.2f}"
            word = (
                ""
                if bound is None
                else (
                    "behind"
                    if name in row["verdict"].split(" ", 1)[-1].split(", ")
                    else row["verdict"].split()[0].replace("behind", "ahead")
                )
            )
            yield f"| {row['row']} | {ours} | {name} | {quartiles} | {shown} | {word} |"
        for name in row["absent"]:
            yield f"| {row['row']} | {ours} | {name} | absent | | |"


def own(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in (row for row in rows if "derived" in row):
        yield f"\n## Without a peer: {row['row']}\n\n| | seconds [quartiles] |\n|---|---:|"
        for name, s in row["seconds"].items():
            yield f"| {name} | {s['median']:.3g} [{s['q1']:.3g}, {s['q3']:.3g}] |"
        yield from (
            f"| {name.replace('_', ' ')} | {value} |" for name, value in row["derived"].items()
        )


def grown(lines: list[dict[str, Any]]) -> Iterator[str]:
    if lines:
        yield "\n## Growth\n\nExponents by a least-squares line in logarithms.\n"
        yield "| what grows | sizes | time | memory | superlinear |\n|---|---|---:|---:|---|"
    for line in lines:
        if "error" in line:
            yield f"| {line['growth']} | | | | failed |"
            continue
        time, memory = (line["exponents"][key] for key in ("time", "memory"))
        word = (
            "; ".join([", ".join(line["superlinear"]), line["reason"] or "no reason is known"])
            if line["superlinear"]
            else ""
        )
        sizes = f"{line['sizes'][0]:,} to {line['sizes'][-1]:,}"
        yield f"| {line['text']} | {sizes} | {time:.2f} | {'under 2 MB' if memory is None else f'{memory:.2f}'} | {word} |"


def settings(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "\n## Settings\n\n| rows | settings |\n|---|---|"
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.get("settings", ""), []).append(row["row"])
    yield from (f"| {', '.join(names)} | {text} |" for text, names in found.items() if text)

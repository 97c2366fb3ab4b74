"""docs/benchmarks.md from the lines of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.rows import all_rows

PAGE = ROOT / "docs/benchmarks.md"
HEAD = """# Benchmarks

Written by `hatch run bench --render FILE` from the lines of `hatch run bench`; do not edit.

A figure is the time of the other side over the time of Forge: the median of interleaved rounds in one process, with its quartiles.
Above 1, Forge is faster. A row passes with a median of at least its bound and a lower quartile of at least 0.03 less. The noise
rows compare Forge with itself, first and last; outside of 0.98 to 1.02 the run is void. Bounds are 1.00; 0.98 where both sides
call the same kernels of torch; none, or a lower one, where the other side does less.

Kernels, bytes, FLOPs and peak memory of steps at real sizes on a GPU, next to those of peers: [null-gpu-sizes.md](null-gpu-sizes.md).

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


def render(paths: list[Path]) -> None:
    """Write the page from files of lines, one for each run; a later run replaces rows of an earlier one."""
    text = "".join(path.read_text() for path in paths)
    PAGE.write_text(page([json.loads(line) for line in text.splitlines()]))


def page(lines: list[dict[str, Any]]) -> str:
    """Markdown of the lines of one or more runs."""
    heads = [line for line in lines if "run" in line]
    if not heads:
        return HEAD + "It has not been filled: no run on a quiet machine yet.\n" + REPEAT
    found: dict[str, dict[str, Any]] = {}
    noise: list[list[str]] = []  # verdicts of each run
    for line in lines:
        if "run" in line:
            noise.append([])
        elif line.get("row", "").startswith("noise"):
            noise[-1].append(line["verdict"])
        elif "row" in line:
            found[line["row"]] = line | {"of_run": len(noise)}
    rows = list(found.values())
    growths = [line for line in lines if "growth" in line]
    return "\n".join(
        [
            HEAD + "\n".join(header(heads, noise, rows)),
            *table(rows),
            *slower_rows(rows),
            *own(rows),
            *grown(growths),
            *settings(rows),
            REPEAT,
        ]
    )


def header(
    heads: list[dict[str, Any]], noise: list[list[str]], rows: list[dict[str, Any]]
) -> Iterator[str]:
    for number, (head, verdicts) in enumerate(zip(heads, noise), 1):
        e = head["environment"]
        device = f"{e['device_name']}, {e['cpus']} cores, {e['threads']} threads, load before {e['load_before']}"
        limits = (f"{name.replace('_', ' ')} {value:.3g}" for name, value in head["limits"].items())
        yield f"- Run {number}: {head['run']}, commit {e['commit']}, {device}; noise: {', '.join(verdicts) or 'not measured'}"
        yield f"- Limits in run {number}: {', '.join(limits)}"
        if number > 1:
            again = (row["row"] for row in rows if row["of_run"] == number)
            yield f"- Rows of run {number}: {', '.join(again)}"

    e, found = heads[-1]["environment"], heads[-1]["versions"]
    have = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    yield f"- Versions: torch {e['torch']}, Python {e['python']}, {have}"
    yield f"- Not installed: {', '.join(n for n, v in found.items() if not v) or 'none'}"
    passed = sum(row["verdict"] == "passed" for row in rows)
    yield f"- Rows that pass: {passed} of {len(rows)}\n"


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "## Next to peers\n\n| row | Forge, ms | peer | median [quartiles] | bound | |\n|---|---:|---|---:|---:|---|"
    for row in rows:
        if "error" in row:
            yield f"| {row['row']} | | | | | failed: {row['error'].splitlines()[0][:80]} |"
            continue
        ours = 1000 * row["seconds"].get("forge", {"median": 0})["median"]
        for name, r in row["ratios"].items():
            bound, figure = row["bounds"][name], f"{r['median']:.2f} [{r['q1']:.2f}, {r['q3']:.2f}]"
            word = "below" if name in row["verdict"].partition(" ")[2].split(", ") else "passed"
            last = "none | |" if bound is None else f"{bound:.2f} | {word} |"
            yield f"| {row['row']} | {ours:.4g} | {name} | {figure} | {last}"
        yield from (
            f"| {row['row']} | {ours:.4g} | {name} | absent | | |" for name in row["absent"]
        )


def slower_rows(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Each figure under 1.00 that has a bound, with its cause."""
    known = all_rows()
    causes: dict[str, list[str]] = {}
    for row in rows:
        for name, ratio in row.get("ratios", {}).items():
            if ratio["median"] < 1 and row["bounds"][name] is not None:
                cause = known[row["row"]].causes.get(name, "not known")
                causes.setdefault(cause, []).append(f"{row['row']}, {name}")
    if causes:
        yield "\n## Why a figure is under 1.00\n\nFrom a profile of both sides.\n\n| row, peer | cause |\n|---|---|"
    yield from (f"| {'<br>'.join(pairs)} | {cause} |" for cause, pairs in causes.items())


def own(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in (row for row in rows if row.get("derived")):
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
        shown = ("under 2 MB" if v is None else f"{v:.2f}" for v in line["exponents"].values())
        word = f"{', '.join(line['superlinear'])}; {line['reason']}" if line["superlinear"] else ""
        yield f"| {line['text']} | {', '.join(line['sizes'])} | {' | '.join(shown)} | {word} |"


def settings(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "\n## Settings\n\n| rows | settings |\n|---|---|"
    found: dict[str, list[str]] = {}
    for row in (row for row in rows if "settings" in row):
        found.setdefault(row["settings"], []).append(row["row"])
    yield from (f"| {', '.join(names)} | {text} |" for text, names in found.items())

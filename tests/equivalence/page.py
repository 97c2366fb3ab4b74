"""The page that people read, from the rows that the campaign writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cells import FEATURES, LAYOUTS, ONE_RANK_BF16, OPTIMIZERS, QUANTITIES

_HEAD = """# Equivalence

Every layout trains what one process trains. Each cell is three steps of a small decoder on real
processes, compared with one process in plain PyTorch (no Forge parallelism, torch's loss, clipping and
optimizers, packed documents run apart) from the same seed weights with the same micro-batches. The
numbers are the worst error, max|a - b| / max|b|, over all steps, tensors and ranks.

- loss: of the global batch, as every rank reports it
- gradients: each whole tensor after the backward pass, before clipping
- norm: the global gradient norm; every rank must have the same bits
- weights: after three updates with SGD and momentum, or AdamW with eps 1e-4
- one rank bf16: the worst of these against the same bf16 training on one rank

"deferred" sums nothing over ranks before the last micro-batch. "uneven" is the rule, not the
exception: all features but the plain one and those without labels have a different number of labels on
every rank and micro-batch. CPU offload from a CPU shows that the path is right, not that it is fast.

{bounds}

This page is written by `python tests/equivalence/run_cells.py` from `equivalence.json`, which also holds
seed, seconds, commit and torch version of each cell. Here: commit {commits}, torch {torches}.
"""

_TITLES = {
    "one_rank": "One rank, wrapped",
    "fsdp_2": "FSDP, 2 ranks",
    "fsdp_4": "FSDP, 4 ranks",
    "hsdp_2x2": "HSDP, 2 copies of 2 shards",
}


def page(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown of all rows, a table for each layout."""
    rows = list(rows)
    head = _HEAD.format(
        bounds=_bounds(rows),
        commits=_distinct(row["commit"] for row in rows),
        torches=_distinct(row["torch"] for row in rows),
    )
    tables = [_table(layout, rows) for layout in LAYOUTS]
    return "\n".join([head, *filter(None, tables)])


def _bounds(rows: list[Mapping[str, Any]]) -> str:
    """The distinct sets of bounds, one line each."""
    by_text: dict[str, list[str]] = {}
    for row in rows:
        values = set(row["bound"].values())
        text = ", ".join(f"{name} {value:g}" for name, value in row["bound"].items())
        text = f"{values.pop():g} for everything" if len(values) == 1 else text
        feature = row["cell"].split("/")[1]
        many = "" if row["cell"].startswith("one_rank") else " on many ranks"
        kind = f"{'bf16_reduce' if feature == 'bf16_reduce' else 'bf16'}{many}"
        by_text.setdefault(text, []).append(kind if feature.startswith("bf16") else "fp32")
    lines = [f"- {_distinct(kinds)}: {text}" for text, kinds in by_text.items()]
    return "\n".join(["Bounds (reasons in `tests/equivalence/cells.py`):", "", *sorted(lines)])


def _table(layout: str, rows: list[Mapping[str, Any]]) -> str:
    mine = [row for row in rows if row["cell"].split("/")[0] == layout]
    if not mine:
        return ""
    columns = [*QUANTITIES]
    if any(ONE_RANK_BF16 in row["error"] for row in mine):
        columns.append(ONE_RANK_BF16)
    lines = [
        f"## {_TITLES[layout]}",
        "",
        "| feature | optimizer | " + " | ".join(columns) + " | |",
        "|---" * (len(columns) + 3) + "|",
    ]
    places = {(f, o): (i, j) for i, f in enumerate(FEATURES) for j, o in enumerate(OPTIMIZERS)}
    for row in sorted(mine, key=lambda row: places[tuple(row["cell"].split("/")[1:])]):
        _, feature, optimizer = row["cell"].split("/")
        found = [f"{row['error'][c]:.1e}" if c in row["error"] else "" for c in columns]
        lines.append(f"| {feature} | {optimizer} | {' | '.join(found)} | {_verdict(row)} |")
    return "\n".join([*lines, ""])


def _verdict(row: Mapping[str, Any]) -> str:
    green = all(row["error"][name] <= bound for name, bound in row["bound"].items())
    return "green" if green else "**red**"


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))

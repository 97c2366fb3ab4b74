"""The page that people read, from the rows that the campaign writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_HEAD = """# Reshard

What is saved in one layout goes on in every other. For each ordered pair, a small mixture of experts (4
layers, 8 experts with biases, AdamW with eps 1e-4) trains 3 steps in the first layout and is saved; the
second loads it and trains 3 more. After the load, every whole tensor (weights, biases of experts, all
slots of the optimizer) has the bits of the first layout. After the 3 steps, losses, weights and moments
are compared with those of the run that stayed in the first layout; the number is the worst
max|a - b| / max|b| of all. Ranks are real gloo processes.

{number} pairs of {layouts} layouts: {green} green{red}. Tensors with other bits after a load: {contents}.
Worst error after 3 steps: {worst:.1e}, bound {bound:g} (fp32; the same sums in another order).

This page is written by `hatch run reshard` (`python -m tests.reshard.run_pairs`) from `reshard.json`, which
holds seed, error by quantity, seconds, commit and torch version of each pair. Here: commit {commits}, seed
{seeds}, torch {torches}, {minutes:.0f} minutes.

"""


def page(rows: Iterable[Mapping[str, Any]], layouts: Mapping[str, tuple[int, Mapping]]) -> str:
    """Markdown of all rows: a square of the worst errors, saved in the row, loaded in the column."""
    rows = list(rows)
    errors = {row["pair"]: max(row["error"].values()) for row in rows}
    red = {row["pair"] for row in rows if not _is_green(row)}
    head = _HEAD.format(
        number=len(rows),
        layouts=len({name for row in rows for name in row["pair"].split(" -> ")}),
        green=len(rows) - len(red),
        red=f", {len(red)} red" if red else "",
        contents=int(sum(row["error"]["contents"] for row in rows)),
        worst=max(errors.values()),
        bound=max(rows[0]["bound"].values()),
        commits=_distinct(row["commit"] for row in rows),
        seeds=_distinct(str(row["seed"]) for row in rows),
        torches=_distinct(row["torch"] for row in rows),
        minutes=sum(row["seconds"] for row in rows) / 60,
    )
    lines = ["| layout | ranks | keys of `[parallel]` |", "|---|---|---|"]
    for name, (world, keys) in layouts.items():
        keys_text = ", ".join(f"{key} = {value!r}".replace("'", '"') for key, value in keys.items())
        lines.append(f"| {name} | {world} | {keys_text} |")
    lines += ["", "| saved in \\ loaded in | " + " | ".join(layouts) + " |"]
    lines.append("|---" * (len(layouts) + 1) + "|")
    for first in layouts:
        cells = [_cell(f"{first} -> {then}", errors, red) for then in layouts]
        lines.append(f"| {first} | " + " | ".join(cells) + " |")
    return head + "\n".join(lines) + "\n"


def _cell(pair: str, errors: Mapping[str, float], red: set[str]) -> str:
    if pair not in errors:
        return ""
    return f"**{errors[pair]:.0e}**" if pair in red else f"{errors[pair]:.0e}"


def _is_green(row: Mapping[str, Any]) -> bool:
    return all(row["error"][name] <= bound for name, bound in row["bound"].items())


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))

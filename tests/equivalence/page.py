"""The page that people read, from the rows that the campaign writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cells import BY_NAME, FEATURES, LAYOUTS, ONE_RANK_BF16, OPTIMIZERS, QUANTITIES, ROUTES

_HEAD = """# Equivalence

Every layout trains what one process trains. Each cell is three steps of a small decoder on real
processes, compared with one process in plain PyTorch (no Forge parallelism, torch's loss, clipping and
optimizers, packed documents run apart) from the same seed weights with the same micro-batches. The
numbers are the worst error, max|a - b| / max|b|, over all steps, tensors and ranks.

- loss: of the global batch, as every rank reports it
- gradients: each whole tensor after the backward pass, before clipping
- norm: the global gradient norm; every rank must have the same bits
- weights: after three updates with SGD and momentum, or AdamW with eps 1e-4, or Muon in fp32 (a matrix at a time in the
  reference), or AdamW with moments in bf16 (`adamw_bf16`); Lion gets gradients that are the same on both sides, as the sign of rounding is no number to compare; biases
  of routers, too
- routes: in mixtures, that each expert was chosen as often; in the seeds used no choice is nearer than 1e-4
- one rank bf16: the worst of these against the same bf16 training on one rank

{number} cells on up to {world} ranks: {green} green{red}{refused}. Worst error in {precision}: {worst:.1e}.

"deferred" sums nothing over ranks before the last micro-batch. "uneven" is the rule, not the
exception: all features but the plain one and those without labels have a different number of labels on
every rank and micro-batch. Heads are grouped (four of queries, two of keys; in `one_key_head` one) in all cells. In mixtures every
second layer has four routed experts, two for each token, and a shared one; `moe` chooses by softmax
with a balance loss per micro-batch and a z-loss, `moe_bias` by sigmoid with a loss per sequence and a bias;
router losses of the reference are added to its loss. Pipelines have four layers, else there are two.
In `fused` cells the head computes the loss and all logits are never held. `compile` goes through
aot_eager, `inductor` through the compiler proper. Float8 rounds on purpose and has
no cell. CPU offload from a CPU shows that the path is right, not that it is fast.

{bounds}

This page is written by `hatch run matrix` (`python tests/equivalence/run_cells.py`) from
`{source}`, which also holds seed, commit and torch version of each cell. Seconds are those of the
cell on its ranks, on {machine}. Here: commit {commits}, torch {torches}, {minutes:.0f} minutes.
"""
#: What comes after it is the section of random jobs, which `tests/fuzz/page.py` writes.
RANDOM_JOBS = "\n<!-- random jobs: "
_AXES = {"pp": "PP", "dp_replicate": "HSDP", "dp_shard": "FSDP", "cp": "CP", "tp": "TP", "ep": "EP"}


def page(rows: Iterable[Mapping[str, Any]], source: str = "equivalence.json") -> str:
    """Markdown of all rows, a table for each layout; `source` is the file that they are in."""
    rows = list(rows)
    machines = _distinct(f"{row['device']} ({row['settings']})" for row in rows if "device" in row)
    refused = len([row for row in rows if "refused" in row])
    cells = [row for row in rows if "cell" in row]
    red = sum(_verdict(row) != "green" for row in cells)
    head = _HEAD.format(
        number=len(cells),
        world=max(LAYOUTS[row["cell"].split("/")[0]].world for row in cells),
        green=len(cells) - red,
        red=f", {red} red" if red else "",
        refused=f"; {refused} combinations are refused, with the\nmessage below" if refused else "",
        precision="TF32" if any(row.get("tf32") for row in cells) else "fp32",
        worst=max((max(r["error"].values()) for r in cells if "bf16" not in r["cell"]), default=0),
        source=source,
        machine=machines or "two cores",
        bounds=_bounds(cells),
        commits=_distinct(row["commit"] for row in rows),
        torches=_distinct(row["torch"] for row in rows),
        minutes=sum(row["seconds"] for row in cells) / 60,
    )
    tables = [_table(layout, cells) for layout in LAYOUTS]
    return "\n".join([head, *filter(None, [*tables, _refused(rows) if refused else ""])])


def _bounds(rows: list[Mapping[str, Any]]) -> str:
    """The distinct sets of bounds, one line each."""
    by_text: dict[str, list[str]] = {}
    for row in rows:
        bound = {name: value for name, value in row["bound"].items() if name != ROUTES}
        text = ", ".join(f"{name} {value:g}" for name, value in bound.items())
        values = set(bound.values())
        text = f"{values.pop():g} for everything" if len(values) == 1 else text
        layout, feature, _ = row["cell"].split("/")
        many = "" if layout == "one_rank" else " on many ranks"
        sizes = LAYOUTS[layout].sizes
        axes = " with tp, cp or ep" if max(sizes.tp, sizes.cp, sizes.ep) > 1 else ""
        own = feature if feature in ("bf16_reduce", "pictures_bf16") else "bf16"
        kind = f"{own}{many}{axes}"
        plain = "TF32" if row.get("tf32") else "fp32"
        pictures = " of pictures" if row.get("tf32") and "picture" in feature else ""
        by_text.setdefault(text, []).append(kind if "bf16" in feature else plain + pictures)
    lines = [f"- {_distinct(kinds)}: {text}" for text, kinds in by_text.items()]
    return "\n".join(["Bounds (reasons in `tests/equivalence/cells.py`):", "", *sorted(lines)])


def _title(layout: str) -> str:
    """`FSDP 2 x TP 2: fsdp_tp, 4 ranks`."""
    one = LAYOUTS[layout]
    axes = [f"{_AXES[n]} {size}" for n, size in one.sizes._asdict().items() if size > 1]
    notes = [str(one.keys["pp_schedule"])] if "pp_schedule" in one.keys else []
    notes += ["whole sequences under tp"] if not one.keys.get("sequence_parallel", True) else []
    notes += ["ring"] if one.keys.get("cp_exchange") == "ring" else []
    said = f" ({', '.join(notes)})" if notes else ""
    ranks = f"{one.world} rank{'s' if one.world > 1 else ''}"
    return f"{' x '.join(axes) or 'One rank'}{said}: `{layout}`, {ranks}"


def _table(layout: str, rows: list[Mapping[str, Any]]) -> str:
    mine = [row for row in rows if row["cell"].split("/")[0] == layout]
    if not mine:
        return ""
    more = [name for name in (ROUTES, ONE_RANK_BF16) if any(name in row["error"] for row in mine)]
    columns = [*QUANTITIES, *more]
    lines = [
        f"## {_title(layout)}",
        "",
        "| feature | optimizer | " + " | ".join(columns) + " | seconds | |",
        "|---" * (len(columns) + 4) + "|",
    ]
    places = {
        (f, o): (i, j)
        for i, f in enumerate(FEATURES)
        for j, o in enumerate((*OPTIMIZERS, *BY_NAME))
    }
    for row in sorted(mine, key=lambda row: places[tuple(row["cell"].split("/")[1:])]):
        _, feature, optimizer = row["cell"].split("/")
        found = " | ".join(_number(c, row["error"]) for c in columns)
        lines.append(
            f"| {feature} | {optimizer} | {found} | {row['seconds']:.1f} | {_verdict(row)} |"
        )
    return "\n".join([*lines, ""])


def _number(column: str, error: Mapping[str, float]) -> str:
    if column not in error:
        return ""
    return (
        ("same" if error[column] == 0 else "other") if column == ROUTES else f"{error[column]:.1e}"
    )


def _refused(rows: list[Mapping[str, Any]]) -> str:
    lines = ["## Refused", "", "| combination | message |", "|---|---|"]
    for row in rows:
        if "refused" in row:
            first, *more = row["message"].replace("|", "\\|").splitlines()
            said = f"{first} (and {len(more)} more)" if more else first
            lines.append(f"| {row['refused']} | {said} |")
    return "\n".join([*lines, ""])


def _verdict(row: Mapping[str, Any]) -> str:
    green = all(row["error"][name] <= bound for name, bound in row["bound"].items())
    return "green" if green else "**red**"


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))

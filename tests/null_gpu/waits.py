"""The kept table of host waits, kernels and collectives, which may only shrink, and the page made from it.

A row is a JSON object: layout, ranks, kernels and collectives of a steady step of rank 0, waits as
{phase: {"module:function": times}}, of each function those of the rank that waits most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]
#: Phases that the table holds, and what they are.
PHASES = {
    "step": "a step",
    "row": "a logged row",
    "evaluation": "an evaluation",
    "save": "a save",
    "background": "a save, in its thread",
}


def problems(row: Row, kept: Row | None, reason: str) -> Iterator[str]:
    """Why a row is red: a step that waits without a reason or launches more kernels than in the kept row, and each wait
    or collective that is new or made more often. Without a kept row there is nothing to compare with."""
    for function, times in row["waits"].get("step", {}).items():
        if not reason:
            yield f"{row['layout']}: a step waits {times} times in {function}, and a step waits for nothing"
    if kept is not None:
        yield from (text for text, more in _changes(row, kept) if more)


def fewer(row: Row, kept: Row) -> list[str]:
    """What is less than in the kept row: kernels, each wait, each collective."""
    return [text for text, more in _changes(row, kept) if not more]


def _changes(row: Row, kept: Row) -> Iterator[tuple[str, bool]]:
    """(sentence, whether there are more) for kernels, and for each wait and collective, of another number."""
    was, times = kept["kernels"], row["kernels"]
    if was != times:
        yield (
            f"{row['layout']}: a step launches {times} kernels, {was} in the kept table",
            times > was,
        )

    for phase, meaning in PHASES.items():
        before, now = (table["waits"].get(phase, {}) for table in (kept, row))
        for function in sorted({*before, *now}):
            was, times = before.get(function, 0), now.get(function, 0)
            if was != times:
                yield f"{row['layout']}: {meaning} waits {times} times in {function}, {was} in the kept table", times > was  # fmt: skip
    before, now = kept["collectives"], row["collectives"]
    for kind in sorted({*before, *now}):
        was, times = before.get(kind, 0), now.get(kind, 0)
        if was != times:
            yield f"{row['layout']}: a step makes {kind} {times} times, {was} in the kept table", times > was  # fmt: skip


_HEAD = """# Layouts on the null GPU

`forge-train run` on {ranks} devices that compute nothing ([null-gpu.md](null-gpu.md)): the real dispatcher, allocator, autograd,
process groups and compiler of torch {torch}, with kernels that leave their output alone. Each of these {number} jobs trains,
is evaluated and saved, goes on from its checkpoint, is evaluated and saved again, and generates where its kind of model can.
It shows that this code runs; it shows no numbers.

A *host wait* is a call in which the host waits for the device: kernels that would be queued meanwhile are not. The
contract: a step waits for nothing, except for the split sizes of expert parallelism; {zero} of the {number} layouts keep it without
an exception, the others have their reason below. `hatch run null-gpu layouts` compares each layout with this table, and is red for
a wait or a collective of a step that is new or made more often, and for a step with more kernels; `--write` writes what became less. Kernels are launches and cuBLAS calls of rank 0 in a steady step.

Written by `hatch run null-gpu layouts --write` from `null-gpu-layouts.json`. Commit {commits}.

"""


def page(rows: Iterable[Row], reasons: Mapping[str, str]) -> str:
    """Markdown of all rows; `reasons` are those of layouts whose steps may wait."""
    rows = list(rows)
    head = _HEAD.format(
        ranks=f"{min(r['ranks'] for r in rows)} to {max(r['ranks'] for r in rows)}",
        torch=", ".join(sorted({row["torch"] for row in rows})),
        number=len(rows),
        zero=sum(not row["waits"].get("step") for row in rows),
        commits=", ".join(sorted({row["commit"] for row in rows})),
    )
    columns = ["layout", "ranks", "kernels a step", "collectives a step", *(f"waits of {m}" for m in PHASES.values())]  # fmt: skip
    lines = [_line(columns), _line(["---"] * len(columns)), *map(_cells, rows)]
    waits = [_section(rows, phase) for phase in PHASES]
    why = [
        f"- **{row['layout']}**: {reasons[row['layout']]}."
        for row in rows
        if reasons.get(row["layout"])
    ]
    return "\n".join([head + "\n".join(lines), *waits, "\n## Steps that wait\n", *why]) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(row: Row) -> str:
    made = ", ".join(f"{n} {name.replace('_', '-')}" for name, n in row["collectives"].items())
    waits = [sum(row["waits"].get(phase, {}).values()) for phase in PHASES]
    return _line([row["layout"], str(row["ranks"]), str(row["kernels"]), made, *map(str, waits)])


def _section(rows: list[Row], phase: str) -> str:
    """Where the waits of a phase are, each function with the layouts that have it so often."""
    found: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        for function, times in row["waits"].get(phase, {}).items():
            found.setdefault((function, times), []).append(row["layout"])
    lines = [
        f"\n## Waits of {PHASES[phase]}\n",
        _line(["function", "times", "layouts"]),
        _line(["---"] * 3),
    ]
    for (function, times), layouts in sorted(found.items()):
        many = (
            "all"
            if len(layouts) == len(rows)
            else "; ".join(layouts)
            if len(layouts) <= 12
            else f"{len(layouts)}"
        )
        lines.append(_line([f"`{function}`", str(times), many]))
    return "\n".join(lines if found else [*lines[:1], "None."])

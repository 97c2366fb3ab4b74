"""The tables of a profile, for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LABELS = {
    "gemm": "matrix products",
    "attention": "attention",
    "optimizer": "optimizer",
    "elementwise": "elementwise and all else",
    "copy": "memory copies",
    "communication": "communication, exposed",
    "idle": "idle",
}
_MEMORY = {
    "optimizer": "optimizer state",
    "activations_and_other": "activations and all else, at the step's peak",
    "step_peak_gradients": "gradients, at the step's peak",
    "step_peak": "step's peak, these two",
    "peak": "peak with all that was there before",
}


def tables(found: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """What `breakdown` found for a person, milliseconds a step: kinds of work, spans, with `memory` bytes by category.

    Each is its head and its rows, of which the first column has names and the others numbers.

    for head, rows in tables(json.loads(path.read_text())):
        print(head, rows)
    """
    steps, whole = found["steps"], found["seconds"]
    kinds = [
        [_LABELS[k], _milliseconds(s, steps), _share(s, whole)] for k, s in found["kinds"].items()
    ]
    hidden = found["communication_hidden"]
    rows = [
        *kinds,
        ["step", _milliseconds(whole, steps), _share(whole, whole)],
        ["communication, hidden under these", _milliseconds(hidden, steps), _share(hidden, whole)],
    ]
    parts: list[tuple[list[str], list[list[str]]]]
    parts = [([f"work on {found['device']}", "ms a step", "share"], rows)]
    if found["spans"]:
        names = ["host_seconds", "device_seconds", "idle_seconds"]
        spans = [
            [name, f"{s['count'] / steps:.3g}", *(_milliseconds(s[n], steps) for n in names)]
            for name, s in sorted(found["spans"].items(), key=lambda i: -i[1]["host_seconds"])
        ]
        parts.append((["span", "times a step", "host, ms", "device, ms", "device idle, ms"], spans))
    if found.get("memory"):
        sizes = [[_MEMORY.get(k, k), f"{size / 2**20:.2f}"] for k, size in found["memory"].items()]
        parts.append((["memory", "MiB"], sizes))
    return parts


def markdown(found: Mapping[str, Any]) -> str:
    """`tables` in Markdown.

    print(markdown(breakdown(read_trace(path))))
    """
    parts = [f"{found['steps']} steps on {found['device']}"]
    return "\n\n".join([*parts, *(_table(head, rows) for head, rows in tables(found))]) + "\n"


def _milliseconds(seconds: float, steps: int) -> str:
    return f"{seconds / steps * 1e3:.3f}"


def _share(seconds: float, whole: float) -> str:
    return f"{seconds / whole:.1%}" if whole else "-"


def _table(head: list[str], rows: list[list[str]]) -> str:
    ruler = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ruler, *rows])

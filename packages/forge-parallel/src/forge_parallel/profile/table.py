"""Tables of a breakdown to read or print."""

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
    """Return the tables of a `breakdown`, each as (head, rows): kinds of work, spans, and `memory` by category.

    Times are milliseconds per step. The first column holds names, the others numbers.

        for head, rows in tables(json.loads(path.read_text())):
            print(head, rows)
    """
    steps, total = found["steps"], found["seconds"]
    times = {_LABELS[kind]: seconds for kind, seconds in found["kinds"].items()}
    times["step"] = total
    times["communication, hidden under these"] = found["communication_hidden"]
    rows = [
        [label, _milliseconds(seconds, steps), f"{seconds / total:.1%}" if total else "-"]
        for label, seconds in times.items()
    ]
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
    """Return the `tables` in Markdown.

    print(markdown(breakdown(read_trace(path))))
    """
    text = [f"{found['steps']} steps on {found['device']}"]
    for head, rows in tables(found):
        ruler = ["---"] + ["---:"] * (len(head) - 1)
        text.append("\n".join(f"| {' | '.join(row)} |" for row in [head, ruler, *rows]))
    return "\n\n".join(text) + "\n"


def _milliseconds(seconds: float, steps: int) -> str:
    return f"{seconds / steps * 1e3:.3f}"

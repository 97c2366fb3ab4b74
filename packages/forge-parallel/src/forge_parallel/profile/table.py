"""The one table of a profile, as text."""

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


def markdown(found: Mapping[str, Any]) -> str:
    """What `breakdown` found as tables in Markdown, milliseconds a step; with `memory` bytes by category, too.

    print(markdown(breakdown(read_trace(path))))
    """
    steps, whole = found["steps"], found["seconds"]
    kinds = [
        [_LABELS[k], _milliseconds(s, steps), _share(s, whole)] for k, s in found["kinds"].items()
    ]
    hidden = found["communication_hidden"]
    rows = [
        *kinds,
        ["**step**", _milliseconds(whole, steps), _share(whole, whole)],
        ["communication, hidden under these", _milliseconds(hidden, steps), _share(hidden, whole)],
    ]
    parts = [
        f"{steps} steps on {found['device']}",
        _table([found["device"], "ms a step", "share"], rows),
    ]
    if found["spans"]:
        names = ["host_seconds", "device_seconds", "idle_seconds"]
        spans = [
            [name, f"{s['count'] / steps:g}", *(_milliseconds(s[n], steps) for n in names)]
            for name, s in sorted(found["spans"].items(), key=lambda i: -i[1]["host_seconds"])
        ]
        head = ["span", "times a step", "host, ms", "device, ms", "device idle, ms"]
        parts.append(_table(head, spans))
    if found.get("memory"):
        sizes = [[name, f"{size / 2**20:.2f}"] for name, size in found["memory"].items()]
        parts.append(_table(["memory", "MiB"], sizes))
    return "\n\n".join(parts) + "\n"


def _milliseconds(seconds: float, steps: int) -> str:
    return f"{seconds / steps * 1e3:.3f}"


def _share(seconds: float, whole: float) -> str:
    return f"{seconds / whole:.1%}" if whole else "-"


def _table(head: list[str], rows: list[list[str]]) -> str:
    ruler = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ruler, *rows])

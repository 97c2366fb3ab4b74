"""Rows of the suite, one module per subject. A row names its sides and how each of them is made.

A side is Forge's ("forge", the first) or a peer's. It is made from a case, which all sides of the row share (inputs,
weights, files), and is a callable that does one step. A peer that is not installed raises ImportError and is reported as absent.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

MODULES = ("model", "runner", "ranks", "moe", "loss", "optimizers", "generate", "data", "checkpoint", "startup", "vlm")  # fmt: skip

Side = Callable[[Any], Callable[[], object]]


class Setting:
    """Where a row runs: its device, its sizes and a folder that goes with it."""

    def __init__(self, size: str, device: str = "cpu") -> None:
        self.size, self.device, self.stack = size, torch.device(device), contextlib.ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["FORGE_CACHE"] = str(self.folder / "cache")

    def of(self, full: Any, quick: Any, h100: Any = None) -> Any:
        """The value for this size: "full", "quick", or "h100" (by default as full)."""
        h100 = full if h100 is None else h100
        return {"full": full, "quick": quick, "h100": h100}[self.size]


@dataclass(frozen=True)
class Row:
    """One comparison.

    name: `subject-case`, unique.
    case: makes what all sides share, from the setting and `options`.
    sides: how each side is made; the first is compared with the others.
    settings: the settings of the sides, printed with the figures.
    bounds: least median of (other time / first time), by side; 1.00 if not given, None for no bound.
    causes: why Forge is slower, by side, from a profile of both; printed with figures under 1.00.
    tolerance: largest max|a - b| / max|b| between results of the first steps; None does not compare.
    derive: for a row without peers, figures from the median seconds of its sides.
    ranks: processes that run every side together.
    """

    name: str
    case: Callable[..., Any]
    sides: Mapping[str, Side]
    settings: str
    options: Mapping[str, Any] = field(default_factory=dict)
    bounds: Mapping[str, float | None] = field(default_factory=dict)
    causes: Mapping[str, str] = field(default_factory=dict)
    tolerance: float | None = None
    derive: Callable[[dict[str, float]], dict[str, Any]] | None = None
    ranks: int = 1
    warmup: int = 2


def all_rows() -> dict[str, Row]:
    """Every row by name. Imports no peer."""
    modules = (importlib.import_module(f"benchmarks.rows.{name}") for name in MODULES)
    return {row.name: row for module in modules for row in module.ROWS}

"""What is done with the runs of `forge_train`: evaluations, texts, activations, reports, replays and studies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_lab.evaluate import evaluate_run
    from forge_lab.extract import extract_run
    from forge_lab.report.goodput import run_goodput
    from forge_lab.report.page import write_page
    from forge_lab.study.replay import replay_step
    from forge_lab.study.runs import read_study

__all__ = ["evaluate_run", "extract_run", "read_study", "replay_step", "run_goodput", "write_page"]

#: The module of each name, imported at first use: most of them import torch.
_HOME = {
    "evaluate_run": "evaluate",
    "extract_run": "extract",
    "read_study": "study.runs",
    "replay_step": "study.replay",
    "run_goodput": "report.goodput",
    "write_page": "report.page",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'forge_lab' has no attribute {name!r}")
    return getattr(importlib.import_module(f"forge_lab.{_HOME[name]}"), name)

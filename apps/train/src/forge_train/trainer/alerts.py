"""resilience.alerts: who follows the journal of a run."""

from __future__ import annotations

import contextlib
import os

from forge_resilience.alerts import FOLLOWED, Alerts, AlertsConfig
from forge_train.trainer.run_directory import RunDirectory


def alerts(
    paths: RunDirectory, config: AlertsConfig, rank: int = 0
) -> contextlib.AbstractContextManager[object]:
    """Follow the journal while open: on rank 0, unless the process that started the ranks does."""
    if rank or FOLLOWED in os.environ:
        return contextlib.nullcontext()
    return Alerts(paths.events, config)

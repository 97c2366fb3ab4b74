"""A callback that leaves time to disturb a run."""

from __future__ import annotations

import time

from forge_train import Callback, Trainer


class Pause(Callback):
    """A step takes a quarter of a second at least."""

    def on_step_end(self, trainer: Trainer) -> None:
        time.sleep(0.25)

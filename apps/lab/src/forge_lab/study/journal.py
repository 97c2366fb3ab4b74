"""How a step of a run was trained, from the run's journal: by which life, and behind which rollbacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_resilience import read_events
from forge_train import RunDirectory

Event = dict[str, Any]


@dataclass(frozen=True)
class Journal:
    """The events that made a run what it is: what a later life or a rollback undid is not among them.

    `lives` are events `start` and `resume`, each of a later step than the one before, and `rollbacks` are events
    `rollback`, by rising `to_step`.
    """

    lives: Sequence[Event]
    rollbacks: Sequence[Event]

    @property
    def begin(self) -> int:
        """The step that the run began behind: that of its parent for a fork that kept the cursor, else 0."""
        return int(self.lives[0]["step"]) if self.lives else 0

    @property
    def total_steps(self) -> int | None:
        """The length of the run, of its last life; None for a run that has not begun."""
        return int(self.lives[-1]["total_steps"]) if self.lives else None

    def world_size_of(self, step: int) -> int | None:
        """Processes of the life that trained `step`; of the last one for a step that none has trained."""
        lives = [life for life in self.lives if life["step"] < step] or self.lives
        return int(lives[-1]["world_size"]) if lives else None

    def world_size_for(self, step: int) -> int | None:
        """Processes for a replay: those of the life that trained `step`, if its [parallel] is still that of the run."""
        moved = any(key.startswith("parallel.") for key in self.changed_since(step))
        return self.world_size_of(self.lives[-1]["step"] + 1 if moved else step)

    def changed_since(self, step: int) -> dict[str, list[Any]]:
        """{key: [value when `step` was trained, value of the last life]} of keys that later lives changed."""
        return _merged([life for life in self.lives if life["step"] >= step])


def _merged(lives: Sequence[Event]) -> dict[str, list[Any]]:
    """What lives changed, one after another."""
    found: dict[str, list[Any]] = {}
    for life in lives:
        for key, (before, now) in life.get("changed", {}).items():
            found[key] = [found.get(key, [before])[0], now]
    return {key: values for key, values in found.items() if values[0] != values[1]}


def read_journal(run: Path) -> Journal:
    """The journal of a run; an empty one where there is none."""
    lives: list[Event] = []
    rollbacks: list[Event] = []
    saved: dict[int, list[Event]] = {}  # rollbacks that the checkpoint of a step is behind
    for event in read_events(RunDirectory(run).events):
        kind, step = event.get("event"), event.get("step", 0)
        if kind == "save":
            saved[step] = rollbacks
        elif kind == "rollback":
            to_step = event["to_step"]
            rollbacks = [*(e for e in rollbacks if e["to_step"] < to_step), event]
        elif kind in ("start", "resume"):
            undone = [life for life in lives if life["step"] >= step]
            kept = lives[: len(lives) - len(undone)]
            lives = [*kept, {**event, "changed": _merged([*undone, event])}]
            rollbacks = saved.get(step, [])
    return Journal(lives, rollbacks)

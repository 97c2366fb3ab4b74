"""How far a run is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from forge_resilience import NumericsPolicy
from forge_train._shared.problems import invalid

_COUNTERS = ("step", "tokens", "seconds")
_SINCE_ROW = ("skipped_since_row", "moe_since_row")


@dataclass
class Progress:
    """Counters that a checkpoint carries: optimizer steps, tokens seen, seconds of training, alone and times the ranks
    that trained in them; the verdicts of the steps so far, which checkpoints of version 0.1 lack; and how many steps
    the next row of metrics counts as skipped of those before the checkpoint, if it is between two rows.

    moe_since_row: what versions before saved of experts, now a part of the state of that extension.

    world_size: ranks of this life. The lives of a checkpoint without `device_seconds` count as if they had had as many.
    """

    policy: NumericsPolicy
    world_size: int = 1
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0
    skipped_since_row: int = 0
    moe_since_row: list[float] = field(default_factory=list)

    def count(self, seconds: float) -> None:
        """Add seconds of training of this life."""
        self.seconds += seconds
        self.device_seconds += seconds * self.world_size

    def state_dict(self) -> dict[str, Any]:
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return counters | {
            "device_seconds": self.device_seconds,
            "policy": self.policy.state_dict(),
            "skipped_since_row": self.skipped_since_row,
        }

    def load_checks(self, state: Any) -> None:
        """Raise ValueError for values that no run can have saved."""
        values = [state.get(name) for name in _COUNTERS] if isinstance(state, dict) else []
        counts = [value for value in values[:2] if type(value) is int and value >= 0]
        times = [values[2], state.get("device_seconds", 0.0)] if values else [None]
        finite = all(_is_number(t) and t >= 0 for t in times)
        if len(counts) < 2 or not finite:
            rule = "must hold step, tokens and seconds of at least 0"
            raise invalid("progress", "damaged", state, rule)
        skipped, sums = (state.get(name, zero) for name, zero in zip(_SINCE_ROW, (0, [])))
        numbers = sums if isinstance(sums, list) else [None]
        if type(skipped) is not int or skipped < 0 or not all(map(_is_number, numbers)):
            rule = "must be a count and a list of finite numbers"
            raise invalid("progress.since_row", "damaged", [skipped, sums], rule)
        if "policy" in state:
            self.policy.load_checks(state["policy"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens, self.seconds = (state[name] for name in _COUNTERS)
        self.device_seconds = state.get("device_seconds", self.seconds * self.world_size)
        self.skipped_since_row = state.get("skipped_since_row", 0)
        self.moe_since_row = state.get("moe_since_row", [])
        # without one, that of a new run: after a rollback this one has judged steps that are undone
        self.policy.load_state_dict(state.get("policy", NumericsPolicy().state_dict()))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, float | int) and math.isfinite(value)

"""How far a run is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from forge_resilience import NumericsPolicy
from forge_train._shared.problems import invalid

_COUNTERS = ("step", "tokens", "seconds")


@dataclass
class Progress:
    """Counters that a checkpoint carries: optimizer steps, tokens seen, seconds of training, alone and times the ranks
    that trained in them; and the verdicts of the steps so far, which checkpoints of version 0.1 lack.

    world_size: ranks of this life. The lives of a checkpoint without `device_seconds` count as if they had had as many.
    """

    policy: NumericsPolicy
    world_size: int = 1
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0

    def count(self, seconds: float) -> None:
        """Add seconds of training of this life."""
        self.seconds += seconds
        self.device_seconds += seconds * self.world_size

    def state_dict(self) -> dict[str, Any]:
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return counters | {
            "device_seconds": self.device_seconds,
            "policy": self.policy.state_dict(),
        }

    def load_checks(self, state: Any) -> None:
        """Raise ValueError for values that no run can have saved."""
        values = [state.get(name) for name in _COUNTERS] if isinstance(state, dict) else []
        counts = [value for value in values[:2] if type(value) is int and value >= 0]
        times = [values[2], state.get("device_seconds", 0.0)] if values else [None]
        finite = all(isinstance(t, float | int) and 0 <= t < math.inf for t in times)
        if len(counts) < 2 or not finite:
            rule = "must hold step, tokens and seconds of at least 0"
            raise invalid("progress", "damaged", state, rule)
        if "policy" in state:
            self.policy.load_checks(state["policy"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens, self.seconds = (state[name] for name in _COUNTERS)
        self.device_seconds = state.get("device_seconds", self.seconds * self.world_size)
        # without one, that of a new run: after a rollback this one has judged steps that are undone
        self.policy.load_state_dict(state.get("policy", NumericsPolicy().state_dict()))

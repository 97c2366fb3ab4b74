"""How far a run is."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """Counters that a checkpoint carries: optimizer steps, tokens seen, seconds of training."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_checks(self, state: Any) -> None:
        """Raise ValueError for values that no run can have saved."""
        values = [state.get(name) for name in asdict(self)] if isinstance(state, dict) else []
        counts = [value for value in values[:2] if type(value) is int and value >= 0]
        seconds = values[2] if values else None
        finite = isinstance(seconds, float | int) and 0 <= seconds < math.inf
        if len(counts) < 2 or not finite:
            raise ValueError(f"{state!r:.200} must hold step, tokens and seconds of at least 0")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]

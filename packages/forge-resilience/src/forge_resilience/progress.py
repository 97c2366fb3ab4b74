"""Progress of a run: the counters that a checkpoint carries."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from forge_resilience._shared.problems import invalid
from forge_resilience.policy import NumericsPolicy

__all__ = ["Progress"]


@dataclass
class Progress:
    """Counters of a run, as an object of its checkpoints.

    policy             verdicts of the steps so far, which checkpoints of version 0.1 lack
    world_size         ranks of this attempt; the attempts of a checkpoint without `device_seconds` count as if they had as many
    step, tokens       optimizer steps done, tokens seen
    seconds            of training, over all attempts
    device_seconds     the same times the ranks that trained in them
    skipped_since_row  steps before the checkpoint that the next row of metrics counts as skipped
    moe_since_row      sums of experts in checkpoints of earlier versions; the extension saves them now
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
        """Add seconds of training of this attempt."""
        self.seconds += seconds
        self.device_seconds += seconds * self.world_size

    def state_dict(self) -> dict[str, Any]:
        """The counters, and the state of the policy."""
        names = ("step", "tokens", "seconds", "device_seconds", "skipped_since_row")
        return {name: getattr(self, name) for name in names} | {"policy": self.policy.state_dict()}

    def load_checks(self, state: Any) -> None:
        """Raise ValueError for values that no run can have saved."""
        values = state if isinstance(state, dict) else {}
        counts = [values.get("step"), values.get("tokens")]
        times = [values.get("seconds"), values.get("device_seconds", 0.0)]
        if not all(map(_is_count, counts)) or not all(_is_number(t) and t >= 0 for t in times):
            rule = "must hold step, tokens and seconds of at least 0"
            raise invalid("progress", "damaged", state, rule)

        skipped, sums = values.get("skipped_since_row", 0), values.get("moe_since_row", [])
        if not _is_count(skipped) or not isinstance(sums, list) or not all(map(_is_number, sums)):
            rule = "must be a count and a list of finite numbers"
            raise invalid("progress.since_row", "damaged", [skipped, sums], rule)
        if "policy" in values:
            self.policy.load_checks(values["policy"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the counters of a checkpoint."""
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.device_seconds = state.get("device_seconds", self.seconds * self.world_size)
        self.skipped_since_row = state.get("skipped_since_row", 0)
        self.moe_since_row = state.get("moe_since_row", [])
        # without one, the policy of a new run: after a rollback this one has judged steps that are undone
        self.policy.load_state_dict(state.get("policy", NumericsPolicy().state_dict()))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)

"""Steps whose numbers cannot be trusted: a verdict on the device, and what follows from a row of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["NonfiniteConfig", "RollbackConfig", "SpikeConfig"]

_MAX_STEPS = 10**6
_GOOD, _NONFINITE, _SPIKE = 0, 1, 2


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _require(problems: list[str]) -> None:
    if problems:
        raise ValueError("\n".join(problems))


@dataclass(frozen=True)
class NonfiniteConfig:
    """Steps whose loss or gradient norm is nan or inf. They never change a weight."""

    action: Literal["stop", "skip", "rollback"] = _field(
        "stop",
        "stop: the first such step ends the run with code 76; skip: one more than max_in_a_row does; "
        "rollback: one more goes back to a checkpoint and leaves their data out",
    )
    max_in_a_row: int = _field(
        3, "skip and rollback: steps in a row that are skipped without further consequences"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.max_in_a_row <= _MAX_STEPS:
            raise ValueError(
                f"max_in_a_row {self.max_in_a_row} must be from 0 to {_MAX_STEPS}; use 3"
            )

    @property
    def limit(self) -> int:
        """Steps in a row without further consequences."""
        return 0 if self.action == "stop" else self.max_in_a_row


@dataclass(frozen=True)
class SpikeConfig:
    """Steps whose loss or gradient norm is far above those before. They change no weight, either."""

    action: Literal["off", "skip", "stop", "rollback"] = _field(
        "off",
        "skip: such a step changes nothing; stop: it ends the run with code 76; rollback: the run goes back "
        "to a checkpoint and leaves its data out",
    )
    sigma: float = _field(
        6.0, "standard deviations above the mean of the window at which a value is a spike"
    )
    window: int = _field(128, "steps of the window; none is judged before it is full")
    of: Literal["loss", "grad_norm", "both"] = _field("loss", "the number that is judged")

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.sigma <= 1000:
            problems.append(f"sigma {self.sigma} must be above 0 and at most 1000; use 6.0")
        if not 2 <= self.window <= _MAX_STEPS:
            problems.append(f"window {self.window} must be from 2 to {_MAX_STEPS} steps; use 128")
        _require(problems)


@dataclass(frozen=True)
class RollbackConfig:
    """Going back to a checkpoint, for either cause."""

    max_rollbacks: int = _field(2, "rollbacks of a run; the next one ends it with code 76")
    batches_before: int = _field(
        0, "batches before the bad ones whose data is left out, too (PaLM left out some 200)"
    )
    lr_factor: float = _field(1.0, "the learning rate is multiplied by this at each rollback")

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.max_rollbacks <= _MAX_STEPS:
            problems.append(
                f"max_rollbacks {self.max_rollbacks} must be from 1 to {_MAX_STEPS}; use 2, or another action"
            )
        if not 0 <= self.batches_before <= _MAX_STEPS:
            problems.append(
                f"batches_before {self.batches_before} must be from 0 to {_MAX_STEPS}; use 0"
            )
        if not 0 < self.lr_factor <= 1:
            problems.append(
                f"lr_factor {self.lr_factor} must be above 0 and at most 1; use 1.0 to keep the rate"
            )
        _require(problems)

"""What a job says about where and how precisely it computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from forge_parallel._rules import Rule, check

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("bf16", "fp32")

CAPABILITIES: tuple[Rule, ...] = (
    Rule(
        "device",
        lambda c: c["device"] not in DEVICES,
        "device {device!r} must be one of auto, cpu, cuda",
        "use auto",
    ),
    Rule(
        "precision",
        lambda c: c["precision"] not in PRECISIONS,
        "precision {precision!r} must be bf16 or fp32",
        "use bf16 (fp32 weights, bf16 compute) or fp32",
    ),
)


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ParallelConfig:
    """Device and precision of a run on one process. Raises ValueError with every broken rule.

    Usage: `ParallelConfig(device="cpu", precision="fp32")`.
    """

    device: Literal["auto", "cpu", "cuda"] = _field(
        "auto", "where tensors live; auto: the GPU if there is one, else the CPU"
    )
    precision: Literal["bf16", "fp32"] = _field(
        "bf16", "bf16: fp32 weights and moments, bf16 forward and backward; fp32: fp32 throughout"
    )

    def __post_init__(self) -> None:
        check(vars(self), CAPABILITIES, "parallel")

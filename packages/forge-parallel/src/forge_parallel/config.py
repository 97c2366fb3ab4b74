"""What a job says about where, how precisely and on how many ranks it computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from forge_parallel._rules import Rule, check

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("bf16", "fp32")

CAPABILITIES: tuple[Rule, ...] = (
    Rule(
        "device",
        lambda c: c["device"] not in DEVICES,
        "device {device!r} must be one of auto, cpu, cuda",
        "use auto",
    ),
    Rule(
        "precision",
        lambda c: c["precision"] not in DTYPES,
        "precision {precision!r} must be bf16 or fp32",
        "use bf16 (fp32 weights, bf16 compute) or fp32",
    ),
    Rule(
        "reduce_dtype",
        lambda c: c["reduce_dtype"] not in DTYPES,
        "reduce_dtype {reduce_dtype!r} must be fp32 or bf16",
        "use fp32",
    ),
    Rule(
        "reduce_dtype needs bf16",
        lambda c: (c["reduce_dtype"], c["precision"]) == ("bf16", "fp32"),
        "reduce_dtype bf16 must go with precision bf16, and precision is {precision}",
        "use reduce_dtype = 'fp32' or precision = 'bf16'",
    ),
    Rule(
        "dp_replicate",
        lambda c: c["dp_replicate"] < 1,
        "dp_replicate {dp_replicate} must be at least 1",
        "use 1 for plain FSDP",
    ),
    Rule(
        "dp_shard",
        lambda c: c["dp_shard"] < 1 and c["dp_shard"] != -1,
        "dp_shard {dp_shard} must be at least 1, or -1",
        "use -1 for all ranks that are left",
    ),
    Rule(
        "ep", lambda c: c["ep"] < 1, "ep {ep} must be at least 1", "use 1 for no expert parallelism"
    ),
    Rule(
        "timeout_seconds",
        lambda c: not 0 < c["timeout_seconds"] < float("inf"),
        "timeout_seconds {timeout_seconds} must be finite and above 0",
        "use 600",
    ),
    Rule(
        "start_timeout_seconds",
        lambda c: not 0 < c["start_timeout_seconds"] < float("inf"),
        "start_timeout_seconds {start_timeout_seconds} must be finite and above 0",
        "use 300",
    ),
)


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ParallelConfig:
    """Device, precision and layout of a run. Raises ValueError with every broken rule.

    Usage: `ParallelConfig(dp_replicate=2, dp_shard=8)`; how many ranks there are says the launcher.
    """

    device: Literal["auto", "cpu", "cuda"] = _field(
        "auto", "where tensors live; auto: the GPU if there is one, else the CPU"
    )
    precision: Literal["bf16", "fp32"] = _field(
        "bf16", "bf16: fp32 weights and moments, bf16 forward and backward; fp32: fp32 throughout"
    )
    reduce_dtype: Literal["fp32", "bf16"] = _field(
        "fp32", "dtype in which gradients are summed over ranks; bf16 halves the traffic"
    )
    dp_replicate: int = _field(
        1, "copies of the sharded model (HSDP); gradients are summed over them"
    )
    dp_shard: int = _field(
        -1, "ranks that share one copy of the model (FSDP2); -1: all that are left"
    )
    ep: int = _field(
        1, "ranks that share the experts of a mixture; they also read data of their own"
    )
    reshard_after_forward: bool = _field(
        True, "free gathered weights after the forward and gather them again for the backward; "
              "false: more memory, less traffic"
    )  # fmt: skip
    cpu_offload: bool = _field(
        False, "keep weights, gradients and moments in host memory; the update runs there"
    )
    timeout_seconds: float = _field(600.0, "how long a collective may take before the run fails")
    start_timeout_seconds: float = _field(300.0, "how long ranks wait for each other at the start")

    def __post_init__(self) -> None:
        check(vars(self), CAPABILITIES, "parallel")

    def data_layout(self, world_size: int) -> tuple[int, int]:
        """(dp_replicate, dp_shard) on `world_size` ranks; ValueError unless they multiply to it and
        `ep` divides the shards."""
        replicate, shard = self.dp_replicate, self.dp_shard
        if shard == -1 and world_size % replicate == 0:
            shard = world_size // replicate
        if shard == -1:
            raise ValueError(
                f"parallel: dp_replicate {replicate} must divide the {world_size} ranks of the job; "
                f"use {_divisors(world_size)}"
            )
        if replicate * shard != world_size:
            raise ValueError(
                f"parallel: dp_replicate {replicate} x dp_shard {shard} = {replicate * shard} must be "
                f"the {world_size} ranks of the job; use dp_shard = -1 or start {replicate * shard} "
                "processes"
            )
        if shard % self.ep:
            raise ValueError(
                f"parallel: ep {self.ep} must divide dp_shard {shard}, whose ranks it borrows; use "
                f"{_divisors(shard)}"
            )
        return replicate, shard


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)

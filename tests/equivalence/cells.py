"""The cells: every layout and feature that must equal one process, and how near."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Worst of the four quantities against the same cell on one rank.
ONE_RANK_BF16 = "one rank bf16"
QUANTITIES = ("loss", "gradients", "norm", "weights")
# Error of a tensor is max|a - b| / max|b|.
#
# fp32: both sides compute the same sums in another order. The largest have some hundred terms, the
# rounding unit is 6e-8.
FP32_BOUND = 1e-5
# bf16 against the fp32 reference. The rounding unit is 2^-9 = 2e-3. An entry of a gradient passes some
# twenty roundings in a row (two blocks and the head, forward and backward), which add up like a random
# walk: sqrt(20) 2e-3 = 9e-3, and the worst of some thousand entries is four to five times that. Loss and
# norm are sums over many tokens and entries, where most of it cancels. A weight moves by about a
# hundredth of its size in the three updates; where the sign of its gradient is uncertain, so is that.
BF16_BOUNDS = {"loss": 2e-3, "gradients": 5e-2, "norm": 5e-3, "weights": 2e-2}
# bf16 on many ranks against bf16 on one: the same roundings, summed over micro-batches in fp32 on both
# sides. What is left: a weight that differs in its last fp32 bit may round to the other bf16 number, which
# changes a sum of 32 or more products by one part in 2^8 of one of them, 1e-4.
BF16_ONE_RANK_BOUND = 1e-3


@dataclass(frozen=True)
class Layout:
    """Ranks and their arrangement."""

    world: int
    dp_replicate: int = 1


@dataclass(frozen=True)
class Feature:
    """What a cell does beside training. Fields that are left alone are those of plain fp32 training.

    labels names a rule of `batches.py`; parallel and model are keys of ParallelConfig and
    TransformerConfig; deferred means that nothing is summed over ranks before the last micro-batch
    (FSDP2's `set_requires_gradient_sync`), instead of what forge_parallel's `accumulate` does.
    """

    micro_batches: int = 1
    labels: str = "all"
    packed: bool = False
    deferred: bool = False
    parallel: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def bf16(self) -> bool:
        return self.parallel.get("precision") == "bf16"


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    layout: str
    feature: str
    optimizer: str
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.layout}/{self.feature}/{self.optimizer}"

    @property
    def bounds(self) -> dict[str, float]:
        """Of each quantity; bf16 on many ranks is also compared with bf16 on one."""
        feature, alone = FEATURES[self.feature], LAYOUTS[self.layout].world == 1
        if not feature.bf16:
            return dict.fromkeys(QUANTITIES, FP32_BOUND)
        if alone:
            return BF16_BOUNDS
        rounded = feature.parallel.get("reduce_dtype") == "bf16"  # the sums over ranks are, too
        return {
            **BF16_BOUNDS,
            ONE_RANK_BF16: max(BF16_BOUNDS.values()) if rounded else BF16_ONE_RANK_BOUND,
        }


LAYOUTS = {
    "one_rank": Layout(1),
    "fsdp_2": Layout(2),
    "fsdp_4": Layout(4),
    "hsdp_2x2": Layout(4, dp_replicate=2),
}
_BF16 = {"precision": "bf16"}
FEATURES = {
    "plain": Feature(),
    "accumulation": Feature(micro_batches=3, labels="uneven"),
    "accumulation_deferred": Feature(micro_batches=3, labels="uneven", deferred=True),
    "uneven_labels": Feature(labels="uneven"),
    "no_labels_on_a_rank": Feature(labels="none_on_last_rank"),
    "no_labels_in_a_micro_batch": Feature(micro_batches=2, labels="none_in_a_micro_batch"),
    "no_labels_in_the_batch": Feature(labels="none_in_second_step"),
    "packed": Feature(micro_batches=2, labels="uneven", packed=True),
    "tied_embeddings": Feature(labels="uneven", model={"tie_embeddings": True}),
    "qk_norm": Feature(labels="uneven", model={"qk_norm": True}),
    "no_reshard": Feature(labels="uneven", parallel={"reshard_after_forward": False}),
    "cpu_offload": Feature(micro_batches=2, labels="uneven", parallel={"cpu_offload": True}),
    "bf16": Feature(micro_batches=2, labels="uneven", parallel=_BF16),
    "bf16_deferred": Feature(micro_batches=2, labels="uneven", deferred=True, parallel=_BF16),
    "bf16_packed": Feature(micro_batches=2, labels="uneven", packed=True, parallel=_BF16),
    "bf16_reduce": Feature(
        micro_batches=2, labels="uneven", parallel={**_BF16, "reduce_dtype": "bf16"}
    ),
    "bf16_cpu_offload": Feature(
        micro_batches=2, labels="uneven", parallel={**_BF16, "cpu_offload": True}
    ),
}
OPTIMIZERS = ("sgd", "adamw")
# One rank in plain fp32 wraps nothing; these do.
_ON_ONE_RANK = ("cpu_offload", "bf16", "bf16_deferred", "bf16_packed", "bf16_cpu_offload")
CELLS = tuple(
    Cell(layout, feature, optimizer)
    for layout in LAYOUTS
    for feature in (_ON_ONE_RANK if layout == "one_rank" else FEATURES)
    for optimizer in OPTIMIZERS
)
# What the tests run: every feature with one and with two axes, both optimizers, every layout.
SMOKE = tuple(
    cell
    for cell in CELLS
    if (cell.layout, cell.optimizer) in {("fsdp_2", "sgd"), ("hsdp_2x2", "adamw")}
    or (cell.layout, cell.feature) in {("fsdp_4", "accumulation"), ("one_rank", "bf16_packed")}
)

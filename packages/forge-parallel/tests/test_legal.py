"""Whether a configuration, a layout and a model go together is said in one place, to whoever asks."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forge_parallel import ParallelConfig
from forge_parallel.axes.context import cut_sequence
from forge_parallel.legal import (
    Facts,
    ShardedDim,
    problems,
    uneven_sequence,
    uneven_vocab,
    uneven_width,
)
from forge_parallel.meshes import Axis, Meshes
from forge_parallel.pipeline import Pipeline
from forge_parallel.plan import estimate_layout

sys.path.insert(0, str(Path(__file__).parent))
from plan_models import Llama

pytestmark = pytest.mark.lane("test")

NAMES = {"seq_len": "data.seq_len", "tp": "parallel.tp", "ep": "parallel.ep"}
KINDS: dict[str, tuple[dict[str, Any], int, Facts, str]] = {
    "rows": ({"cp": 2}, 2, Facts(seq_len=14), "seq_len 14 must be divisible by 4 with cp 2; use 12 or 16"),
    "rows of a mixture": (
        {"tp": 2, "sequence_parallel": False}, 2, Facts(seq_len=7, num_experts=4), "divisible by 2 with tp 2"),
    "keys of somebody": (
        {"tp": 2}, 2, Facts(seq_len=7, names=NAMES), "data.seq_len 7 must be divisible by 2 with parallel.tp 2"),
    "float8": (
        {"float8": "rowwise"}, 1, Facts(seq_len=24, micro_batch=1), "and they are 24 (1 x 24 over 1); use a seq_len"),
    "experts": ({"ep": 2}, 2, Facts(num_experts=3), "ep 2 must divide num_experts 3 of a mixture; use ep = 1, or 2"),
    "widths": ({"tp": 4}, 4, Facts(widths=[ShardedDim("num_heads 6", 6)]), "num_heads 6 must be divisible by tp 4"),
    "no id for a rank": ({"tp": 4}, 4, Facts(vocab=[ShardedDim("5 ids", 5)]), "5 ids must leave none of tp 4 ranks empty"),
    "shards that torch misplaces": (
        {"tp": 2}, 16, Facts(vocab=[ShardedDim("257 ids", 257, width=36)]),
        "257 ids of width 36 over tp 2 and 8 shards must be divisible by 2, or the width by 8"),
    "what decides over a micro-batch": (
        {"cp": 2}, 2, Facts(whole_batch={"capacity 1.25": "no capacity"}), "capacity 1.25 decides over the tokens"),
    "tied ends": (
        {"pp": 2, "pp_schedule": "dualpipev"}, 2, Facts(tied=["embedding"]), "embedding is tied, and must have its two"),
    "layers": ({"pp": 2}, 2, Facts(num_layers=1), "num_layers 1 must be at least one for each of the 2 stages"),
    "micro-batches": ({"pp": 2}, 2, Facts(num_micro_batches=1), "1 micro-batches must be at least pp 2 with 1f1b"),
    "what the model lacks": ({"cp": 2}, 2, Facts(obstacles={"cp": ["no attend"]}), "no attend"),
    "blocks": ({"recompute": "full"}, 2, Facts(num_blocks=0, model="Net"), "recompute full must have blocks to keep"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_rule_says_one_sentence_and_nothing_of_what_is_unknown(kind: str) -> None:
    keys, world, facts, wanted = KINDS[kind]
    config = ParallelConfig(**keys)
    layout = config.axes(world)
    (said,) = problems(config, layout, facts)
    assert wanted in said
    assert problems(config, layout, Facts()) == []
    alone = ParallelConfig(device="cpu", precision="fp32")
    assert problems(alone, alone.axes(world), replace(facts, num_blocks=None)) == []


def test_rows_are_refused_where_they_cannot_be_cut_and_nowhere_else() -> None:
    """Against the cuts themselves: 2 cp chunks, of which a rank has two, in tp parts."""
    for length, cp, tp in product(range(1, 50), (1, 2, 3, 4), (1, 2, 3, 4)):
        chunks = 2 * cp if cp > 1 else 1
        here = length // chunks * (2 if cp > 1 else 1)
        fits = length % chunks == 0 and here % tp == 0
        assert (uneven_sequence(length, cp, tp) is None) == fits, (length, cp, tp)


def test_parts_of_a_width_are_whole_units_and_those_of_a_table_are_not_empty() -> None:
    for size, unit, tp in product(range(1, 40), (1, 2, 5), (2, 3, 4)):
        part = size / tp
        assert (uneven_width(ShardedDim("w", size, unit), tp) is None) == (part % unit == 0)
        parts = [len(p) for p in torch.arange(size).chunk(tp)]
        assert (uneven_vocab(ShardedDim("v", size), tp) is None) == (len(parts) == tp)


@pytest.mark.parametrize(("size", "unit"), [(64, 128), (100, 64)])
def test_shared_units_must_be_whole(size: int, unit: int) -> None:
    """Less than one head, and one head with a rest: ranks that share a head would leave rows out."""
    broken = uneven_width(ShardedDim(f"{size} rows", size, unit, shared=True), 2)
    assert broken is not None
    assert "use tp 1" in broken


def test_the_fix_that_is_offered_is_allowed() -> None:
    for length, cp, tp in product(range(1, 50), (1, 2, 3), (1, 2, 3)):
        if said := uneven_sequence(length, cp, tp):
            for fix in said.rpartition("use ")[2].split(" or "):
                assert uneven_sequence(int(fix), cp, tp) is None, said


def test_a_tensor_a_pipeline_and_a_plan_say_the_same_of_rows() -> None:
    wanted = "seq_len 14 must be divisible by 4 with cp 2; use 12 or 16"
    config = ParallelConfig(cp=2, pp=2, precision="fp32")
    meshes = Meshes(torch.device("cpu"), cp=Axis(size=2), pp=Axis(size=2))
    sizes = {"num_micro_batches": 4, "micro_batch": 1, "dim": 8}
    with torch.device("meta"):
        model = Llama()
    asked = (
        lambda: cut_sequence(torch.zeros(1, 14), meshes.cp),
        lambda: Pipeline(nn.Linear(1, 1), config, meshes, seq_len=14, **sizes),
        lambda: estimate_layout(model, config, 8, global_batch=16, micro_batch=1, seq_len=14),
    )
    for ask in asked:
        with pytest.raises(ValueError, match=f"^{wanted}$"):
            ask()


@pytest.mark.parametrize(
    ("options", "sizes", "tied", "wanted"),
    [
        (
            {"tp": 2},
            {"vocab": 257, "dim": 36},
            False,
            "embedding: 257 ids of width 36 over tp 2 and 8 shards",
        ),
        ({"pp": 2, "pp_schedule": "zbv_zero_bubble"}, {}, True, "embedding is tied, and must have"),
    ],
)
def test_a_plan_refuses_what_training_would(
    options: dict[str, Any], sizes: dict[str, int], tied: bool, wanted: str
) -> None:
    with torch.device("meta"):
        model: Any = Llama(**sizes)
    if tied:
        parts = {"first": ("embedding",), "blocks": "layers", "last": ("norm", "embedding")}
        model.head, model.pipeline_parts = None, lambda: parts
    with pytest.raises(ValueError, match=wanted):
        estimate_layout(
            model, ParallelConfig(**options), 16, global_batch=64, micro_batch=1, seq_len=64
        )


def test_ranks_may_share_what_says_so() -> None:
    heads = ShardedDim("2 heads", 2, shared=True)
    assert [tp for tp in range(1, 9) if uneven_width(heads, tp) is None] == [1, 2, 4, 6, 8]
    assert uneven_width(ShardedDim("2 heads", 2), 4) is not None
    assert "or divide it; use tp 1, 2" in (uneven_width(heads, 3) or "")

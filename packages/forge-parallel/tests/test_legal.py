"""Whether a configuration, a layout and a model go together is said in one place, to whoever asks."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from plan_models import Llama
from torch import nn

from forge_parallel import ParallelConfig
from forge_parallel._shared.problems import Problem, ProblemError
from forge_parallel.axes.context import shard_sequence
from forge_parallel.meshes import Axis, Meshes
from forge_parallel.pipeline import Pipeline
from forge_parallel.plan import estimate_layout
from forge_parallel.rules import (
    ModelFacts,
    ShardedDim,
    problems,
    uneven_sequence,
    uneven_vocab,
    uneven_width,
)
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

NAMES = {"seq_len": "data.seq_len", "tp": "parallel.tp", "ep": "parallel.ep"}
KINDS: dict[str, tuple[dict[str, Any], int, ModelFacts, tuple[str, Any, str]]] = {
    "rows": ({"cp": 2}, 2, ModelFacts(seq_len=14), ("seq_len", 14, "divides")),
    "rows-of-a-mixture": (
        {"tp": 2, "sequence_parallel": False}, 2, ModelFacts(seq_len=7, num_experts=4), ("seq_len", 7, "divides")),
    "names-of-the-caller": ({"tp": 2}, 2, ModelFacts(seq_len=7, names=NAMES), ("data.seq_len", 7, "divides")),
    "float8": ({"float8": "rowwise"}, 1, ModelFacts(seq_len=24, micro_batch=1), ("float8", "rowwise", "tokens")),
    "experts": ({"ep": 2}, 2, ModelFacts(num_experts=3), ("ep", 2, "divides")),
    "widths": ({"tp": 4}, 4, ModelFacts(widths=[ShardedDim("num_heads", 6)]), ("num_heads", 6, "divides")),
    "no-id-for-a-rank": ({"tp": 4}, 4, ModelFacts(vocab=[ShardedDim("vocab", 5)]), ("vocab", 5, "empty")),
    "shards that torch misplaces": (
        {"tp": 2}, 16, ModelFacts(vocab=[ShardedDim("vocab", 257, width=36)]), ("vocab", 257, "shards")),
    "what-decides-over-a-micro-batch": (
        {"cp": 2}, 2, ModelFacts(whole_batch={"capacity 1.25": "no capacity"}), ("capacity", 1.25, "whole_batch")),
    "tied ends": (
        {"pp": 2, "pp_schedule": "dualpipev"}, 2, ModelFacts(tied=["embedding"]), ("pp_schedule", "dualpipev", "tied")),
    "layers": ({"pp": 2}, 2, ModelFacts(num_layers=1), ("num_layers", 1, "stages")),
    "micro-batches": ({"pp": 2}, 2, ModelFacts(num_micro_batches=1), ("num_micro_batches", 1, "pp")),
    "what-the-model-lacks": (
        {"cp": 2}, 2, ModelFacts(obstacles={"cp": [Problem("attend", "missing", ..., "is missing")]}),
        ("attend", ..., "missing")),
    "blocks": ({"recompute": "full"}, 2, ModelFacts(num_blocks=0, model="Net"), ("recompute", "full", "blocks")),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_rule_finds_one_problem_and_none_in_unknown_facts(kind: str) -> None:
    keys, world, facts, wanted = KINDS[kind]
    config = ParallelConfig(**keys)
    layout = config.axes(world)
    (problem,) = problems(config, layout, facts)
    assert_problem(ProblemError([problem]), *wanted)
    assert problems(config, layout, ModelFacts()) == []
    alone = ParallelConfig(device="cpu", precision="fp32")
    assert problems(alone, alone.axes(world), replace(facts, num_blocks=None)) == []


def test_rows_are_rejected_only_where_they_cannot_be_split() -> None:
    """Against the cuts themselves: 2 cp chunks, of which a rank has two, in tp parts."""
    for length, cp, tp in product(range(1, 50), (1, 2, 3, 4), (1, 2, 3, 4)):
        chunks = 2 * cp if cp > 1 else 1
        here = length // chunks * (2 if cp > 1 else 1)
        fits = length % chunks == 0 and here % tp == 0
        assert (uneven_sequence(length, cp, tp) is None) == fits, (length, cp, tp)


def test_shards_of_a_width_are_multiples_and_those_of_a_table_are_not_empty() -> None:
    for size, unit, tp in product(range(1, 40), (1, 2, 5), (2, 3, 4)):
        part = size / tp
        assert (uneven_width(ShardedDim("w", size, unit), tp) is None) == (part % unit == 0)
        parts = [len(p) for p in torch.arange(size).chunk(tp)]
        assert (uneven_vocab(ShardedDim("v", size), tp) is None) == (len(parts) == tp)


@pytest.mark.parametrize(("size", "unit"), [(64, 128), (100, 64)])
def test_shared_units_must_not_be_split(size: int, unit: int) -> None:
    """Less than one head, and one head with a rest: ranks that share a head would leave rows out."""
    broken = uneven_width(ShardedDim("rows", size, unit, shared=True), 2)
    assert broken is not None
    assert re.findall(r"\d+", broken.fix) == ["1"]


def test_the_fix_that_is_offered_is_allowed() -> None:
    for length, cp, tp in product(range(1, 50), (1, 2, 3), (1, 2, 3)):
        if broken := uneven_sequence(length, cp, tp):
            fixes = re.findall(r"\d+", broken.fix)
            assert fixes
            assert not any(uneven_sequence(int(fix), cp, tp) for fix in fixes), broken


def test_tensor_pipeline_and_plan_agree_about_rows() -> None:
    config = ParallelConfig(cp=2, pp=2, precision="fp32")
    meshes = Meshes(torch.device("cpu"), cp=Axis(size=2), pp=Axis(size=2))
    sizes = {"num_micro_batches": 4, "micro_batch": 1, "dim": 8}
    with torch.device("meta"):
        model = Llama()
    asked = (
        lambda: shard_sequence(torch.zeros(1, 14), meshes.cp),
        lambda: Pipeline(nn.Linear(1, 1), config, meshes, seq_len=14, **sizes),
        lambda: estimate_layout(model, config, 8, global_batch=16, micro_batch=1, seq_len=14),
    )
    for ask in asked:
        with rejects("seq_len", 14, "divides") as caught:
            ask()
        assert re.findall(r"\d+", caught.value.problems[0].fix) == ["12", "16"]


@pytest.mark.parametrize(
    ("options", "sizes", "tied", "wanted"),
    [
        (
            {"tp": 2},
            {"vocab": 257, "dim": 36},
            False,
            ("embedding", 257, "shards"),
        ),
        (
            {"pp": 2, "pp_schedule": "zbv_zero_bubble"},
            {},
            True,
            ("pp_schedule", "zbv_zero_bubble", "tied"),
        ),
    ],
)
def test_a_plan_rejects_what_training_would(
    options: dict[str, Any], sizes: dict[str, int], tied: bool, wanted: tuple[str, Any, str]
) -> None:
    with torch.device("meta"):
        model: Any = Llama(**sizes)
    if tied:
        parts = {"first": ("embedding",), "blocks": "layers", "last": ("norm", "embedding")}
        model.head, model.pipeline_parts = None, lambda: parts
    with rejects(*wanted):
        estimate_layout(
            model, ParallelConfig(**options), 16, global_batch=64, micro_batch=1, seq_len=64
        )


def test_ranks_may_share_what_is_marked() -> None:
    heads = ShardedDim("heads", 2, shared=True)
    assert [tp for tp in range(1, 9) if uneven_width(heads, tp) is None] == [1, 2, 4, 6, 8]
    assert uneven_width(ShardedDim("heads", 2), 4) is not None
    broken = uneven_width(heads, 3)
    assert broken is not None
    assert re.findall(r"\d+", broken.fix) == ["1", "2"]

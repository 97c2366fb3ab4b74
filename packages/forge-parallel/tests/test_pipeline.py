"""Pipelines without ranks: where a model is cut, what is refused, what stays of it."""

from __future__ import annotations

import itertools
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_nets import S, net
from torch import nn

from forge_parallel import ParallelConfig, _torch_compat
from forge_parallel._shared.problems import ProblemError
from forge_parallel.config import SCHEDULES
from forge_parallel.meshes import Axis
from forge_parallel.pipeline import (
    block_costs,
    keeps_gathered,
    num_stages,
    parts_of,
    rank_of,
    schedule_problems,
    split,
    stage_ranges,
    stages_of,
    stages_on,
    stream_dim,
)
from forge_parallel.pipeline.pipeline import make_schedule
from forge_parallel.pipeline.split import EMBEDDING_COST, follow_mode
from forge_parallel.structure import OrderError, mark
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")


def config(pp: int = 2, schedule: str = "1f1b", **more: Any) -> ParallelConfig:
    return ParallelConfig(device="cpu", precision="fp32", pp=pp, pp_schedule=schedule, **more)  # type: ignore[arg-type]


def meshes(rank: int, size: int = 2) -> Any:
    return SimpleNamespace(pp=Axis(rank, size), device=torch.device("cpu"))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("first_blocks", [1, 3])
def test_the_most_expensive_stage_is_as_cheap_as_any_partition_allows(
    seed: int, first_blocks: int
) -> None:
    draw = random.Random(seed)
    costs = [draw.uniform(0.1, 5) for _ in range(draw.randint(6, 9))]
    count = draw.randint(1, 4)
    dearest = [
        max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *ends, len(costs)]))
        for ends in itertools.combinations(range(1, len(costs)), count - 1)
        if not ends or ends[0] >= first_blocks
    ]
    found = stage_ranges(costs, count, first_blocks)
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert len(found) == count
    assert all(found)
    assert max(sum(costs[i] for i in part) for part in found) == pytest.approx(min(dearest))


def test_equal_blocks_give_even_stages_and_a_heavy_head_fewer_blocks() -> None:
    assert [len(part) for part in stage_ranges([1] * 8, 4)] == [2, 2, 2, 2]
    # where the dearest stage is given, the others are even
    assert [len(part) for part in stage_ranges([1, 1, 1, 1, 9], 3)] == [2, 2, 1]
    assert [len(part) for part in stage_ranges([1, 1, 1, 1, 1, 4], 2)] == [4, 2]


def test_fewer_blocks_than_stages_are_rejected() -> None:
    with rejects("num_layers", 3, "stages"):
        stage_ranges([1, 1, 1], 4)
    assert [len(part) for part in stage_ranges([9, 1, 1], 2, 2)] == [2, 1]
    with rejects("num_layers", 3, "stages", where="3 stages, and 2"):
        stage_ranges([9, 1, 1], 3, 2)


def test_costs_are_counted_and_include_the_ends() -> None:
    model = net(layers=3)
    inside = 2.0 * sum(p.numel() for p in model.layers[0].parameters())
    table = 2.0 * sum(p.numel() for m in (model.embedding, model.place) for p in m.parameters())
    head = 2.0 * sum(p.numel() for m in (model.norm, model.head) for p in m.parameters())
    assert block_costs(model, parts_of(model), S) == [
        inside + EMBEDDING_COST * table,
        inside,
        inside + head,
    ]
    model.layers[1].flops_per_token = lambda seq_len: 7.0 * seq_len  # type: ignore[assignment]
    assert block_costs(model, parts_of(model), S)[1] == 7.0 * S


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_keep_the_names_of_the_full_model_and_lose_none(schedule: str, tied: bool) -> None:
    set_up = config(4, schedule)
    whole = net(tied=tied)
    names = set(whole.state_dict())
    if tied and schedule in ("zbv_zero_bubble", "dualpipev"):
        with rejects("pp_schedule", schedule, "tied"):
            split(whole, set_up, meshes(0, 4))
        return
    seen: list[str] = []
    for rank in range(4):
        model = net(tied=tied)
        stages = split(model, set_up, meshes(rank, 4), seq_len=S)
        assert [stage.pipeline_stage for stage in stages] == stages_on(set_up, rank)
        assert stages_of(model) == stages
        inside = [name for stage in stages for name, _ in stage.named_parameters()]
        mine = dict(model.named_parameters())
        assert sorted(inside) == sorted(mine)
        assert all(p is mine[n] for stage in stages for n, p in stage.named_parameters())
        seen += inside
    twice = {"embedding.weight"} if tied else set()
    assert set(seen) == names
    assert {name for name in seen if seen.count(name) > 1} == twice


def test_stages_lie_in_rounds_or_in_a_v() -> None:
    assert [rank_of(config(3, "interleaved_1f1b"), s) for s in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [rank_of(config(3, "dualpipev"), s) for s in range(6)] == [0, 1, 2, 2, 1, 0]
    assert num_stages(config(3, "interleaved_zero_bubble", pp_stages_per_rank=4)) == 12


def test_stages_of_a_rank_share_modules_and_have_hooks_of_their_own() -> None:
    model = net()
    model.head = head = nn.Linear(16, 5)  # replaced before, as float8 does
    first, second = split(model, config(2, "interleaved_1f1b"), meshes(1), seq_len=S)
    assert model.head is second.head is head
    assert first.head is None
    assert first.embedding is None
    first.register_forward_hook(lambda *_: None)
    assert not second._forward_hooks
    assert not model._forward_hooks
    model.eval()
    follow_mode(model)
    assert not any(m.training for stage in (first, second) for m in stage.modules())


def test_modules_are_replaced_before_stages_share_them() -> None:
    model = net()
    split(model, config(2, "interleaved_1f1b"), meshes(1), seq_len=S)
    with pytest.raises(OrderError) as caught:
        mark(model, "float8")
    assert (caught.value.step, caught.value.after) == ("float8", "split")


def test_a_model_is_partitioned_once_and_before_other_steps() -> None:
    model = net()
    split(model, config(), meshes(0))
    with pytest.raises(OrderError):
        split(model, config(), meshes(0))


class Stranger(nn.Module):
    """Offers nothing."""


@pytest.mark.parametrize(
    ("change", "value", "code"),
    [
        (lambda m: setattr(m, "pipeline_parts", None), ..., "missing"),
        (lambda m: setattr(m, "pipeline_parts", lambda: {"refused": "why"}), ..., "unsupported"),
        (lambda m: setattr(m, "extra", nn.Linear(2, 2)), "extra", "stage"),
        (lambda m: setattr(m, "scale", nn.Parameter(torch.ones(1))), "scale", "stage"),
        (lambda m: delattr(m, "place"), "place", "child"),
    ],
)
def test_models_that_cannot_be_partitioned_are_rejected_by_name(
    change: Any, value: object, code: str
) -> None:
    model = net()
    change(model)
    with rejects("pipeline_parts", value, code):
        split(model, config(), meshes(0))


def test_a_model_without_the_protocol_is_rejected_by_name() -> None:
    with rejects("pipeline_parts", ..., "missing", where="Stranger"):
        parts_of(Stranger())


@pytest.mark.parametrize(
    ("set_up", "batches", "layers", "key", "value", "code", "fix"),
    [
        (config(4), 8, 3, "num_layers", 3, "stages", []),
        (config(4), 3, 8, "num_micro_batches", 3, "pp", ["4"]),
        (config(4, "interleaved_1f1b"), 9, 8, "num_micro_batches", 9, "rounds", ["8", "10"]),
        (config(4, "interleaved_zero_bubble"), 9, 8, "num_micro_batches", 9, "rounds", ["8", "10"]),
        (config(2, "dualpipev"), 3, 8, "num_micro_batches", 3, "stages", ["4"]),
        (config(2, "dualpipev", compile=True), 4, 8, "compile", True, "excludes", []),
        (config(2, "gpipe"), 0, 8, "num_micro_batches", 0, "range", ["2"]),
    ],
)
def test_bad_numbers_are_rejected_before_anything_starts(
    set_up: ParallelConfig,
    batches: int,
    layers: int,
    key: str,
    value: object,
    code: str,
    fix: list[str],
) -> None:
    problems = schedule_problems(set_up, batches, layers)
    assert_problem(ProblemError(problems), key, value, code)
    assert not fix or re.findall(r"\b\d+\b", problems[0].fix) == fix


def test_F124_halves_of_a_backward_need_a_torch_that_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_torch_compat, "SPLITS_ANY_BACKWARD", False)
    for schedule in ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"):
        (problem,) = schedule_problems(config(2, schedule), 4, 8)
        assert_problem(ProblemError([problem]), "pp_schedule", schedule, "requires")
    assert schedule_problems(config(2, "interleaved_1f1b"), 4, 8) == []


def test_without_pp_there_are_no_rules() -> None:
    assert schedule_problems(config(1), 0, 0) == []
    assert not keeps_gathered(config(1, "dualpipev"))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3])
def test_every_number_of_micro_batches_runs_or_is_rejected(schedule: str, pp: int) -> None:
    """torch's own order of a schedule, checked to its end, against our rules."""
    set_up = config(pp, schedule)
    count = num_stages(set_up)
    for batches in range(1, 2 * pp + 4):
        allowed = not schedule_problems(set_up, batches, count)
        assert allowed == _torch_can(set_up, count, batches), batches


def _torch_can(set_up: ParallelConfig, count: int, batches: int) -> bool:
    stages: list[Any] = [
        SimpleNamespace(
            num_stages=count,
            group_size=set_up.pp,
            group_rank=0,
            stage_index=index,
            is_last=index == count - 1,
            submod=None,
            stage_index_to_group_rank={},
        )
        for index in stages_on(set_up, 0)
    ]
    try:
        schedule = make_schedule(set_up, stages, batches, lambda a, b: a)
    except (ValueError, AssertionError, IndexError):
        return False
    if set_up.pp_schedule in ("gpipe", "1f1b"):  # a loop, and no list of actions
        return True
    return _reaches_the_end(schedule.pipeline_order_with_comms, set_up, count, batches)


def _reaches_the_end(
    orders: dict[int, list[Any]], set_up: ParallelConfig, count: int, batches: int
) -> bool:
    """Whether ranks that do their actions in order, and wait for what they need, do them all, and what a
    rank sends to another arrives in the order in which it is awaited."""
    flat = {
        r: [a for one in order for a in one.sub_actions or (one,)] for r, order in orders.items()
    }
    posts: dict[Any, dict[str, list[Any]]] = {}
    for rank, order in flat.items():
        for action in order:
            kind, _, way = action.computation_type.value.partition("_")
            if kind in ("SEND", "RECV"):
                step = 1 if (way == "F") == (kind == "SEND") else -1
                peer = rank_of(set_up, action.stage_index + step)
                pair = (rank, peer) if kind == "SEND" else (peer, rank)
                source = action.stage_index + (0 if kind == "SEND" else step)
                what = (way, source, action.microbatch_index)
                posts.setdefault(pair, {"SEND": [], "RECV": []})[kind].append(what)
    if any(both["SEND"] != both["RECV"] for both in posts.values()):
        return False
    done: set[tuple[str, int, int]] = set()
    places = dict.fromkeys(flat, 0)
    moved = True
    while moved:
        moved = False
        for rank, order in flat.items():
            while places[rank] < len(order) and _ready(order[places[rank]], done, count):
                action = order[places[rank]]
                kind = action.computation_type.value
                kind = "B" if kind == "I" else kind
                done.add((kind, action.stage_index, action.microbatch_index))
                places[rank] += 1
                moved = True
    forwards = sum(kind == "F" for kind, _, _ in done)
    backwards = sum(kind == "B" for kind, _, _ in done)
    ended = all(places[rank] == len(order) for rank, order in flat.items())
    return ended and forwards == backwards == count * batches


def _ready(action: Any, done: set[tuple[str, int, int]], count: int) -> bool:
    kind, stage, i = action.computation_type.value, action.stage_index, action.microbatch_index
    if kind == "F":
        return stage == 0 or ("F", stage - 1, i) in done
    if kind in ("B", "I"):
        return ("F", stage, i) in done and (stage == count - 1 or ("B", stage + 1, i) in done)
    return True


def test_the_width_of_the_stream_is_that_of_the_model() -> None:
    model = net()
    parts = model.pipeline_parts()
    with rejects("dim", None, "type"):
        stream_dim(model)
    model.config = SimpleNamespace(dim=24)
    assert stream_dim(model) == 24
    model.pipeline_parts = lambda: {**parts, "dim": 16}
    assert stream_dim(model) == 16

"""Pipelines on real ranks: every schedule computes what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_nets import clipped, error, evaluate_first, one_process, train

from forge_parallel.config import SCHEDULES
from forge_testing import run_on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

SPLIT = tuple(SCHEDULES)[3:]
LOOPS = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble")


@pytest.mark.lane("quick")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_compute_what_one_process_computes(schedule: str) -> None:
    ranks = run_on_ranks(2, train, {"pp": 2, "pp_schedule": schedule}, {}, 4)
    assert error(ranks, one_process(4)) <= 1e-5
    for rank in ranks:
        # shapes are known: no forward is run in the first step to find them out
        assert rank["forwards"] == [[4] * len(rank["forwards"][0])] * 2
        assert rank["sharded"]
        assert not any(rank["modes"])
        assert (float(rank["own"]) != 0.0) == rank["has_last"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_stages_deep(schedule: str) -> None:
    ranks = run_on_ranks(4, train, {"pp": 4, "pp_schedule": schedule}, {}, 8)
    assert error(ranks, one_process(8)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_shards_or_copies_on_two_ranks(schedule: str, copies: int) -> None:
    options = {"pp": 2, "pp_schedule": schedule, "dp_replicate": copies}
    ranks = run_on_ranks(4, train, options, {}, 8)
    assert error(ranks, one_process(8)) <= 1e-5
    assert all(rank["sharded"] for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recomputation_inside(schedule: str) -> None:
    kind = {"recompute": True}
    ranks = run_on_ranks(4, train, {"pp": 2, "pp_schedule": schedule}, kind, 8)
    assert error(ranks, one_process(8)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble"])
def test_four_stages_on_a_rank(schedule: str) -> None:
    # torch's schedule keeps three of them gathered at a time
    options = {"pp": 2, "pp_schedule": schedule, "pp_stages_per_rank": 4}
    ranks = run_on_ranks(4, train, options, {}, 8)
    assert error(ranks, one_process(8)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
def test_from_a_model_without_storage_in_uneven_stages(schedule: str) -> None:
    options: dict[str, Any] = {"pp": 2, "pp_schedule": schedule}
    ranks = run_on_ranks(4, train, options, {"layers": 5}, 16, 2, True)
    assert error(ranks, one_process(16, layers=5)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SPLIT)
def test_weights_that_are_freed_between_the_halves_of_a_backward_lose_gradients(
    schedule: str,
) -> None:
    # the reason of keeps_gathered; when this passes, torch has changed and the rule can go
    options = {"pp": 2, "pp_schedule": schedule}
    ranks = run_on_ranks(4, train, options, {}, 8, 1, False, True)
    assert error(ranks, one_process(8)) > 0.1


@pytest.mark.parametrize(
    ("world", "schedule"),
    [(2, "1f1b"), *(pytest.param(4, loop, marks=pytest.mark.slow) for loop in LOOPS)],
)
def test_F11_a_tied_embedding_has_one_gradient_and_stays_one(world: int, schedule: str) -> None:
    ranks = run_on_ranks(world, train, {"pp": 2, "pp_schedule": schedule}, {"tied": True}, 8)
    assert error(ranks, one_process(8, tied=True)) <= 1e-5
    both = [rank["weights"]["embedding.weight"] for rank in ranks]
    assert all((one == both[0]).all() for one in both), "copies part"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_F05_gradients_do_not_depend_on_how_rows_are_grouped(schedule: str) -> None:
    # neither on the number of micro-batches nor on the labels in each
    options = {"pp": 2, "pp_schedule": schedule}
    wanted = one_process(8)
    for micro_batch in (1, 2):
        assert error(run_on_ranks(2, train, options, {}, 8, micro_batch), wanted) <= 1e-5


@pytest.mark.slow
def test_F06_clipping_is_by_the_norm_over_all_stages() -> None:
    wanted = one_process(8)
    for rank in run_on_ranks(4, clipped, {"pp": 2, "pp_schedule": "zbv_zero_bubble"}, 8, 0.25):
        assert float(rank["norm"]) == pytest.approx(float(wanted["norm"]), rel=1e-5)
        assert float(rank["own"]) < 0.999 * float(rank["norm"]), "a stage has all of the norm"
        for name, gradient in rank["grads"].items():
            assert torch.allclose(gradient, wanted["grads"][name] / 4, rtol=1e-4, atol=1e-7), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"tp": 2, "sequence_parallel": False}, {"cp": 1}, {"dp_shard": 2}]
)
def test_F09_a_pipeline_starts_with_other_axes(options: dict[str, Any]) -> None:
    ranks = run_on_ranks(4, train, {"pp": 2, **options}, {}, 8)
    assert error(ranks, one_process(8)) <= 1e-5


def test_F10_document_ids_and_positions_reach_every_stage() -> None:
    ranks = run_on_ranks(2, train, {"pp": 2, "pp_schedule": "interleaved_1f1b"}, {}, 4)
    assert error(ranks, one_process(4)) <= 1e-5
    assert error(ranks, one_process(4, keywords=False)) > 1e-2


@pytest.mark.lane("quick")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_F14_evaluation_runs_under_every_schedule(schedule: str) -> None:
    ranks = run_on_ranks(2, evaluate_first, {"pp": 2, "pp_schedule": schedule}, 4)
    wanted = one_process(4)["loss"]
    for rank in ranks:
        for name in ("before", "step", "after"):
            assert float(rank[name]) == pytest.approx(float(wanted), rel=1e-5)
        assert float(rank["fewer"]) != pytest.approx(float(wanted), rel=1e-2)
        assert rank["training"]
        assert rank["grads"]


@pytest.mark.parametrize(
    ("schedule", "world", "rows"), [("interleaved_1f1b", 4, 3), ("zbv_zero_bubble", 2, 1)]
)
def test_fewer_micro_batches_than_ranks(schedule: str, world: int, rows: int) -> None:
    ranks = run_on_ranks(world, train, {"pp": world, "pp_schedule": schedule}, {}, rows)
    assert error(ranks, one_process(rows)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_bf16_flows_between_stages(schedule: str) -> None:
    options = {"pp": 2, "pp_schedule": schedule}
    ranks = run_on_ranks(4, train, options, {}, 8, 1, False, None, torch.bfloat16)
    assert 1e-4 < error(ranks, one_process(8)) <= 5e-2


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s not in SPLIT])
def test_compiled_blocks(schedule: str) -> None:
    options = {"pp": 2, "pp_schedule": schedule}
    ranks = run_on_ranks(2, train, options, {}, 4, 1, False, None, torch.float32, True)
    assert error(ranks, one_process(4)) <= 1e-5

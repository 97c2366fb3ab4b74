"""Counts at real sizes: routes that are given from outside, what turns a count red, and the page."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
from tests.null_gpu import device, routes, sizes, steps
from tests.null_gpu.steps import Absent, Case, flops_of_matrices, forge_step, torchtitan_step

from forge_moe import MoE, expert_parallelize
from forge_moe.dispatch import exchange
from forge_testing import run_on_ranks

pytestmark = pytest.mark.lane("test")

WHY_NOT = device.why_not()
needs_null_gpu = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.mark.parametrize("name", ["round robin", "hot experts"])
def test_sizes_are_those_that_ranks_exchange(name: str) -> None:
    ranks, tokens, top_k = 8, 96, 6
    found = routes.find_routes(name, ranks, tokens, top_k, 64)
    counted = [exchange.tokens_with_slot(ids // 8, ranks) for ids in found.ids]  # (W, K) each
    for rank in range(ranks):
        received = torch.stack([of_rank[rank] for of_rank in counted])  # (W, K)
        assert found.tokens_sent(rank) == counted[rank][:, 0].tolist()
        assert found.tokens_received(rank) == received[:, 0].tolist()
        assert found.tokens_with_slot(rank) == received.sum(0).tolist()
        assert found.rows(rank) == int(received.sum())
        sent, rows = found.splits(rank)
        assert sent == counted[rank].sum(1).tolist()
        assert rows == received.sum(1).tolist()


def test_round_robin_is_even_and_the_trace_is_not() -> None:
    even = routes.find_routes("round robin", 8, 4096, 6, 64)
    assert even.fullest() == 1.0
    assert {even.rows(rank) for rank in range(8)} == {4096 * 6}
    hot = routes.find_routes("hot experts", 8, 4096, 6, 64)
    assert hot.fullest() > 3
    rows = [hot.rows(rank) for rank in range(8)]
    assert sum(rows) == 8 * 4096 * 6
    assert max(rows) > 2 * min(rows)
    assert max(rows) == rows[sizes.CASES["moe 64, EP 8, hot experts"].rank]


def test_natural_routing_and_other_experts_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(routes.WrongRoutes):
        routes.find_routes("", 8, 96, 2, 8)
    with pytest.raises(routes.WrongRoutes):
        routes.find_routes("hot experts", 8, 96, 2, 8)

    class Asked(Exception):
        pass

    def ask(*given: Any) -> None:
        raise Asked(given)

    monkeypatch.setattr(steps, "find_routes", ask)
    with pytest.raises(Asked) as asked:
        forge_step(Case("configs/recipes/moe_8.toml"))
    assert asked.value.args == (("", 8, 4096, 2, 8),)


def _outputs() -> list[torch.Tensor]:
    """Of a layer with round-robin routes, with the sizes that ranks exchange and with those of `force`."""
    from torch.distributed.device_mesh import init_device_mesh

    found = []
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    to_host = exchange.to_host
    for forced in (False, True):
        torch.manual_seed(0)
        layer = expert_parallelize(
            MoE(dim=16, hidden_dim=16, num_experts=4, top_k=2, router="uniform"), mesh
        )
        x = torch.randn(32, 16, requires_grad=True)
        try:
            if forced:
                routes.force(routes.round_robin(2, 32, 2, 4), mesh.get_local_rank())
            layer(x).square().sum().backward()
        finally:
            exchange.to_host = to_host
        assert x.grad is not None
        found += [x.grad, layer.experts.up_proj.grad.to_local()]  # type: ignore[operator, union-attr]
    return found


@pytest.mark.lane("quick")
@pytest.mark.distributed
def test_forced_sizes_compute_what_exchanged_ones_do() -> None:
    for x, w, forced_x, forced_w in run_on_ranks(2, _outputs):
        assert torch.equal(x, forced_x)
        assert torch.equal(w, forced_w)


def row(**changes: int) -> dict[str, int]:
    counts = dict.fromkeys(sizes.BOUNDED, 100)
    return counts | {"matmul_flops": 1000, "analytic_flops": 1000} | changes


@pytest.mark.parametrize("key", sizes.BOUNDED)
def test_a_count_that_rises_is_red(key: str) -> None:
    assert list(sizes.problems("dense 8B", row(), row())) == []
    assert len(list(sizes.problems("dense 8B", row(**{key: 103}), row()))) == 1
    assert list(sizes.problems("dense 8B", row(**{key: 99}), row())) == []


def test_flops_and_peaks_have_bounds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(list(sizes.problems("dense 8B", row(matmul_flops=1011), {}))) == 1
    assert list(sizes.problems("dense 8B", row(matmul_flops=1009), {})) == []
    monkeypatch.setitem(sizes.PEAKS, "dense 8B", 98)
    assert len(list(sizes.problems("dense 8B", row(), {}))) == 1
    places = {"norm": {"kernels": 3, "peak": 100}}
    assert list(sizes.more_in_places(places, places)) == []
    assert len(list(sizes.more_in_places({"norm": {"kernels": 4, "peak": 103}}, places))) == 2


def test_flops_by_the_parameters() -> None:
    def flops(tied: bool) -> int:
        model = torch.nn.ModuleDict(
            {"embedding": torch.nn.Embedding(50, 8), "up": torch.nn.Linear(8, 20)}
        )
        if not tied:
            model["lm_head"] = torch.nn.Linear(8, 50, bias=False)
        return flops_of_matrices(model, tokens=3)

    assert flops(tied=True) == flops(tied=False) == 6 * 3 * (8 * 20 + 8 * 50)


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is not None, reason="torchtitan is here")
def test_a_framework_that_is_not_here_is_absent() -> None:
    with pytest.raises(Absent):
        torchtitan_step(Case())


def test_the_page_is_what_the_table_holds() -> None:
    kept: dict[str, Any] = json.loads(sizes.TABLE.read_text())
    assert sizes.PAGE.read_text() == sizes.page(kept), "hatch run null-gpu sizes --write"
    assert kept["steps"].keys() <= sizes.CASES.keys()
    missing = sizes.CASES.keys() - kept["steps"].keys()
    assert {sizes.CASES[name].peer for name in missing} <= {"torchtitan"}
    for name, counts in kept["steps"].items():
        assert list(sizes.problems(name, counts, {})) == []


@needs_null_gpu
@pytest.mark.slow
def test_counts_of_experts_and_of_places_are_those_of_the_table() -> None:
    assert sizes.main(["--only", "moe 64, EP 8, 2 layers", "--only", "places"]) == 0

"""Muon on real ranks: the update is that of the whole matrix, whatever its placements; collectives are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.optim import Lion, MuonConfig, OptimizerConfig, build_optimizer
from forge_core.optim import muon as muon_module
from forge_core.optim.full_matrices import FullMatrices, balanced, chunk_sizes
from forge_testing import device, run_on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

CONFIG = OptimizerConfig("muon", lr=0.02, weight_decay=0.3, muon=MuonConfig(ns_dtype="fp32"))
#: World size, mesh, and the dims that its axes cut: of matrices, and of stacks (E, in, out). None is a copy,
#: "strided" what FSDP makes of a dim that tp has cut.
LAYOUTS: dict[str, tuple[int, tuple[int, ...], Any, Any]] = {
    "fsdp": (2, (2,), (0,), (0,)),
    "fsdp_columns": (2, (2,), (1,), (2,)),
    "fsdp_uneven": (3, (3,), (0,), (1,)),
    "tp": (2, (2,), (1,), (0,)),
    "hsdp": (4, (2, 2), (None, 0), (None, 1)),
    "efsdp_ep": (4, (2, 2), (0, 1), (1, 0)),
    "fsdp_tp": (4, (2, 2), ("strided", 0), (1, None)),
    "fsdp_tp_rows": (4, (2, 2), (0, 1), (2, 1)),
    "twice_the_same_dim": (4, (2, 2), (0, 0), (1, 1)),
}


class Net(nn.Module):
    """Wide, tall, square and odd matrices, and a stack of experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = [(8, 20), (20, 8), (8, 8), (7, 5)]
        self.layers = nn.ModuleList(
            nn.ParameterDict(
                {
                    **{f"w{i}": torch.randn(shape) for i, shape in enumerate(shapes)},
                    "experts": torch.randn(4, 8, 6),
                    "norm": torch.ones(8),
                }
            )
            for _ in range(2)
        )


def recorded(steps: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    named = list(Net().named_parameters())
    return [{n: torch.randn(p.shape, generator=generator) for n, p in named} for _ in range(steps)]


class Cut:
    """Tensors on the mesh of a layout."""

    def __init__(self, layout: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        _, sizes, self.matrix, self.stack = LAYOUTS[layout]
        self.mesh = init_device_mesh(device().type, sizes, mesh_dim_names=("a", "b")[: len(sizes)])

    def __call__(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.placement_types import _StridedShard

        if tensor.ndim == 1:
            dims: Any = (0, *[None] * (self.mesh.ndim - 1))
        else:
            dims = self.stack if tensor.ndim == 3 else self.matrix
        if "strided" not in dims:
            return distribute_tensor(
                tensor, self.mesh, [Replicate() if d is None else Shard(d) for d in dims]
            )
        dp, tp = self.mesh.get_coordinate()
        local = tensor.chunk(2)[tp].chunk(2)[dp].contiguous()
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        return DTensor.from_local(
            local, self.mesh, placements, shape=tensor.shape, stride=tensor.stride()
        )


def sharded(layout: str, net: nn.Module) -> Cut:
    """The net's parameters become DTensors."""
    cut = Cut(layout)
    for block in net.layers:
        for name, parameter in list(block.items()):
            block[name] = nn.Parameter(cut(parameter.detach()))
    return cut


def run(
    net: nn.Module, optimizer: Any, gradients: list[dict[str, Tensor]], cut: Any = None
) -> None:
    for step in gradients:
        for name, parameter in net.named_parameters():
            parameter.grad = step[name].clone() if cut is None else cut(step[name])
        optimizer.step()


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def errors(net: nn.Module, other: nn.Module) -> dict[str, float]:
    theirs = dict(other.named_parameters())
    return {
        n: float((whole(p.detach()) - theirs[n]).abs().max() / theirs[n].abs().max())
        for n, p in net.named_parameters()
    }


def counted() -> list[str]:
    """Names of the collectives from now on."""
    calls: list[str] = []
    for name in ("all_to_all_single", "all_gather_into_tensor"):
        original = getattr(dist, name)
        original = getattr(original, "counts", original)

        def counts(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        counts.counts = original  # type: ignore[attr-defined]
        setattr(dist, name, counts)
    return calls


def train(layout: str, name: str = "muon") -> dict[str, Any]:
    """Two steps on the layout and on the whole; collectives of the last, and the matrices worked on here."""
    net, twin, gradients = Net(), Net(), recorded(2)
    config = OptimizerConfig(name, lr=0.02, weight_decay=0.3) if name == "lion" else CONFIG
    if name == "muon_bf16":
        config = replace(CONFIG, muon=MuonConfig())
    run(twin, build_optimizer(twin, config), gradients)
    cut = sharded(layout, net)
    optimizer = build_optimizer(net, config)
    muon_module._BUCKET = 1 if name == "buckets" else 2**30
    run(net, optimizer, gradients[:1], cut)
    worked: list[tuple[int, ...]] = []
    original = muon_module.orthogonalize
    muon_module.orthogonalize = lambda m, **k: worked.extend(tuple(x.shape) for x in m) or original(m, **k)  # fmt: skip
    for parameter, gradient in zip(net.parameters(), gradients[1].values(), strict=True):
        parameter.grad = cut(gradient)
    calls = counted()
    optimizer.step()
    muon_module.orthogonalize = original
    calls = list(calls)
    return {"errors": errors(net, twin), "calls": sorted(calls), "worked": worked}


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_in_bf16_ranks_differ_only_by_rounding() -> None:
    """What is gathered is rounded first, as on one process; a batch of another size may round products by 2^-9.

    The iterations enlarge that; an update is a twentieth of a weight. Measured: the same bits.
    """
    for result in run_on_ranks(4, train, "hsdp", "muon_bf16"):
        assert max(result["errors"].values()) <= 2e-3, result["errors"]


COLLECTIVES = {
    "fsdp": (2, 0),
    "fsdp_columns": (2, 0),
    "fsdp_uneven": (2, 0),
    "tp": (2, 0),
    "hsdp": (2, 1),
    "efsdp_ep": (6, 0),  # matrices over both axes, stacks over one
    "fsdp_tp": (6, 1),
    "fsdp_tp_rows": (4, 0),
    "twice_the_same_dim": (4, 0),
}


@pytest.mark.lane("quick")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_F33_the_update_is_that_of_the_full_matrix(layout: str) -> None:
    results = run_on_ranks(LAYOUTS[layout][0], train, layout)
    for result in results:
        # fp32 products of batches of another size; the update is a twentieth of a weight
        assert max(result["errors"].values()) <= 1e-6, result["errors"]
        exchanges, copies = COLLECTIVES[layout]
        assert result["calls"] == ["all_gather_into_tensor"] * copies + ["all_to_all_single"] * exchanges  # fmt: skip


@pytest.mark.lane("quick")
def test_matrices_in_buckets_of_one_are_updated_alike() -> None:
    ranks = LAYOUTS["fsdp"][0]
    for result in run_on_ranks(ranks, train, "fsdp", "buckets"):
        assert max(result["errors"].values()) <= 1e-6, result["errors"]
        matrices = sum(p.ndim == 2 for p in Net().parameters())
        stacks = sum(p.ndim == 3 for p in Net().parameters())
        assert matrices * 2 <= len(result["calls"]) <= (matrices + stacks) * 2


def gathered(layout: str) -> dict[str, Any]:
    """Whether each matrix that this rank works on is one of the model's, and each part comes back."""
    net = Net()
    known = [m for p in net.parameters() if p.ndim > 1 for m in (p if p.ndim == 3 else [p])]
    sharded(layout, net)
    parameters = [p.detach() for p in net.parameters() if p.ndim > 1]
    parts = [p.to_local() for p in parameters]
    seen: list[bool] = []

    def work(matrices: list[Tensor]) -> list[Tensor]:
        seen.extend(any(torch.equal(m, k) for k in known) for m in matrices)
        return [2 * m for m in matrices]

    back = FullMatrices(parameters, cost=lambda r, c: r * c).work(parts, work)
    doubled = all(torch.equal(b, 2 * p) for b, p in zip(back, parts, strict=True))
    return {"seen": seen, "doubled": doubled}


@pytest.mark.lane("quick")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_put_together_in_their_order(layout: str) -> None:
    """The iteration commutes with any order of rows and columns, so its own tests cannot see it."""
    results = run_on_ranks(LAYOUTS[layout][0], gathered, layout)
    assert all(result["doubled"] and all(result["seen"]) for result in results)


@pytest.mark.parametrize("layout", ["fsdp_columns", "hsdp"])
def test_ranks_share_the_matrices(layout: str) -> None:
    """8 matrices and 8 experts, each on one rank, and no rank with more than a fair share."""
    results = run_on_ranks(LAYOUTS[layout][0], train, layout)
    every = sorted(shape for result in results for shape in result["worked"])
    assert every == sorted([(8, 20), (20, 8), (8, 8), (7, 5)] * 2 + [(8, 6)] * 8)
    loads = [sum(min(s) ** 2 * (2 * max(s) + min(s)) for s in r["worked"]) for r in results]
    assert max(loads) <= 1.2 * min(loads)


def test_lion_is_elementwise_on_any_layout() -> None:
    for result in run_on_ranks(4, train, "fsdp_tp", "lion"):
        assert max(result["errors"].values()) <= 1e-6
        assert result["calls"] == []
    assert Lion.update_groups is not muon_module.Muon.update_groups


def summed(name: str) -> float:
    """A step of copied parameters, with gradients of which each rank holds a part; the worst error."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    net, twin, gradients = Net(), Net(), recorded(1)
    mesh = init_device_mesh(device().type, (2,))
    for block in net.layers:
        for at, parameter in list(block.items()):
            block[at] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()]))
    share = 2.0 if dist.get_rank() == 0 else -1.0  # of each gradient; powers of 2 round nothing

    def part(gradient: Tensor) -> Tensor:
        return DTensor.from_local(share * gradient, mesh, [Partial()])

    config = CONFIG if name == "muon" else OptimizerConfig(name, lr=0.02, weight_decay=0.3)
    run(net, build_optimizer(net, config), gradients, part)
    run(twin, build_optimizer(twin, config), gradients)
    return max(errors(net, twin).values())


@pytest.mark.parametrize("name", ["muon", "lion", "adamw", "schedule_free_adamw"])
def test_gradients_that_are_parts_of_a_sum_are_added_up(name: str) -> None:
    assert max(run_on_ranks(2, summed, name)) <= 1e-6


def moved() -> dict[str, float]:
    """Two steps under fsdp, two more under tp with its state, against four on the whole."""
    net, twin, gradients = Net(), Net(), recorded(4)
    run(twin, build_optimizer(twin, CONFIG), gradients)
    cut = sharded("fsdp", net)
    first = build_optimizer(net, CONFIG)
    run(net, first, gradients[:2], cut)
    weights = {n: whole(p.detach()) for n, p in net.named_parameters()}
    state = {
        n: {slot: whole(value) for slot, value in slots.items()}
        for n, slots in first.named_state().items()
    }
    again = Net()
    again.load_state_dict(weights)
    cut = sharded("tp", again)
    second = build_optimizer(again, CONFIG)
    second.load_named_state(
        {
            n: {s: v if isinstance(v, float) else cut(v) for s, v in slots.items()}
            for n, slots in state.items()
        }
    )
    run(again, second, gradients[2:], cut)
    return errors(again, twin)


@pytest.mark.lane("quick")
def test_named_state_goes_from_fsdp_to_tp() -> None:
    for result in run_on_ranks(2, moved):
        assert max(result.values()) <= 1e-6, result


def missing() -> dict[str, Any]:
    """Rank 1 has no gradient of a matrix, which then counts as zero there and is not touched."""
    net, twin, gradients = Net(), Net(), recorded(1)
    cut = sharded("fsdp", net)
    before = net.layers[0]["w0"].detach().to_local().clone()
    optimizer = build_optimizer(net, CONFIG)
    for name, parameter in net.named_parameters():
        parameter.grad = cut(gradients[0][name])
    if dist.get_rank() == 1:
        net.layers[0]["w0"].grad = None
    gradients[0]["layers.0.w0"][4:] = 0
    optimizer.step(skip=torch.tensor(0.0))
    run(twin, build_optimizer(twin, CONFIG), gradients)
    found = errors(net, twin)
    whole_error = found.pop("layers.0.w0")
    own = net.layers[0]["w0"].detach().to_local()
    return {"others": found, "w0": whole_error, "same": torch.equal(own, before)}


def test_a_rank_without_a_gradient_does_not_hang_the_others() -> None:
    first, second = run_on_ranks(2, missing)
    assert max(first["others"].values()) <= 1e-6
    assert not first["same"]
    assert second["same"]


def test_chunks_and_shares() -> None:
    assert chunk_sizes(7, 3) == tuple(map(len, torch.arange(7).chunk(3))) == (3, 3, 1)
    assert chunk_sizes(3, 4) == (1, 1, 1, 0)
    assert chunk_sizes(4, 3) == (2, 2, 0)
    owners = balanced([9, 1, 5, 4, 1], 2)
    assert sorted(sum(c for c, o in zip([9, 1, 5, 4, 1], owners, strict=True) if o == r) for r in (0, 1)) == [10, 10]  # fmt: skip

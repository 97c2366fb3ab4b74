"""Layouts on real ranks: who holds what, and the numbers that all must share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import Stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from forge_parallel import (
    ParallelConfig,
    accumulate,
    clip_grad_norm_,
    global_count,
    global_grad_norm,
    make_meshes,
    parallelize,
)
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "hsdp": {"dp_replicate": 2},
    "gathered": {"reshard_after_forward": False},
    "offload": {"cpu_offload": True},
}


class Net(Stack):
    """Two blocks between two layers; widths that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__(6, 11, 3)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def rows() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(device())  # (B, D)


def train(options: dict[str, Any], parts: int = 1, max_norm: float | None = None) -> dict[str, Any]:
    """Gradients, norms and shards of one rank; the loss is a sum over all rows by 8."""
    config = ParallelConfig(device=device().type, precision="fp32", **options)
    meshes = make_meshes(config)
    model = parallelize(net(), config, meshes)
    mine = rows().chunk(meshes.batch_size)[meshes.batch_rank].chunk(parts)
    for i, part in enumerate(mine):
        accumulate(model, last=i == len(mine) - 1)
        (model(part).square().sum() / 8).backward()
    sums = torch.tensor([1.0 + dist.get_rank(), 0.5], device=device())
    largest, _ = global_grad_norm(model.parameters(), math.inf, sums)
    _, total = global_grad_norm(model.parameters(), sums=sums)
    norm = clip_grad_norm_(model.parameters(), max_norm)
    again, _ = global_grad_norm(model.parameters())
    return {
        "gradients": {n: whole(p.grad) for n, p in model.named_parameters()},
        "placements": {n: str(p.placements) for n, p in model.named_parameters()},
        "axes": meshes.dense.mesh_dim_names,
        "columns": (meshes.batch_rank, meshes.batch_size),
        "norms": (norm, largest, again),
        "sums": total,
    }


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reference() -> dict[str, torch.Tensor]:
    model = net().double()
    (model(rows().double()).square().sum() / 8).backward()
    return {n: p.grad for n, p in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_norms_are_those_of_one_process(layout: str, parts: int) -> None:
    wanted = reference()
    norm = math.sqrt(sum(float(g.square().sum()) for g in wanted.values()))
    largest = max(float(g.abs().max()) for g in wanted.values())
    ranks = run_on_ranks(4, train, LAYOUTS[layout], parts)
    for rank in ranks:
        for name, gradient in wanted.items():
            error = (rank["gradients"][name] - gradient).abs().max() / gradient.abs().max()
            assert error <= 1e-5, name
        assert float(rank["norms"][0]) == pytest.approx(norm, rel=1e-5)
        assert float(rank["norms"][1]) == pytest.approx(largest, rel=1e-5)
        assert rank["sums"].tolist() == [10.0, 2.0]
    assert len({tuple(map(float, rank["norms"])) for rank in ranks}) == 1, "bits differ by rank"


def test_F08_hsdp_holds_copies_on_one_axis_and_shards_on_the_other() -> None:
    ranks = run_on_ranks(4, train, {"dp_replicate": 2})
    assert {rank["axes"] for rank in ranks} == {("dp_replicate", "dp_shard")}
    assert {p for rank in ranks for p in rank["placements"].values()} == {
        "(Replicate(), Shard(dim=0))"
    }
    assert [rank["columns"] for rank in ranks] == [(r, 4) for r in range(4)]


def test_F04_clipping_scales_by_the_global_norm_on_every_rank() -> None:
    wanted = reference()
    norm = math.sqrt(sum(float(g.square().sum()) for g in wanted.values()))
    for rank in run_on_ranks(4, train, {}, 1, norm / 3):
        assert float(rank["norms"][0]) == pytest.approx(norm, rel=1e-5)
        assert float(rank["norms"][2]) == pytest.approx(norm / 3, rel=1e-5)
        for name, gradient in wanted.items():
            assert torch.allclose(rank["gradients"][name], gradient.float() / 3, rtol=1e-4)


def mixed_norm() -> tuple[float, float]:
    """Gradients of every kind: sharded, copied, both, plain; each number counts once."""
    two = init_device_mesh(device().type, (2, 2), mesh_dim_names=("a", "b"))
    one = init_device_mesh(device().type, (4,))
    full = torch.arange(1.0, 11.0, device=device()).reshape(5, 2)
    kinds = [
        (one, [Shard(0)]),
        (one, [Replicate()]),
        (two, [Replicate(), Shard(0)]),
        (two, [Shard(0), Shard(1)]),
    ]
    parameters: list[Any] = []
    for mesh, placements in kinds:
        value = distribute_tensor(full, mesh, placements)
        parameters.append(nn.Parameter(value.clone()))
        parameters[-1].grad = value
    parameters.append(nn.Parameter(full.clone()))
    parameters[-1].grad = full.clone()
    parameters.append(nn.Parameter(torch.ones(3, device=device())))  # never used
    norm = clip_grad_norm_(parameters)
    partial = nn.Parameter(DTensor.from_local(full, one, [Partial()]))
    partial.grad = partial.detach()
    with rejects("placements", (Partial(),), "partial"):
        clip_grad_norm_([partial])
    return float(norm), float(clip_grad_norm_(parameters, norm_type=math.inf))


def test_one_norm_over_gradients_on_different_meshes() -> None:
    squares = sum(n * n for n in range(1, 11))
    for norm, largest in run_on_ranks(4, mixed_norm):
        assert norm == pytest.approx(math.sqrt(5 * squares), rel=1e-6)
        assert largest == 10.0


def count(valid: list[float]) -> float:
    meshes = make_meshes(ParallelConfig(device=device().type, precision="fp32"))
    return float(global_count(valid[dist.get_rank()], meshes))


@pytest.mark.lane("test")
def test_F13_labels_are_counted_over_the_global_batch() -> None:
    assert run_on_ranks(4, count, [3, 0, 11, 1]) == [15.0] * 4
    assert run_on_ranks(2, count, [0, 0]) == [1.0] * 2  # nothing to learn divides by one
    assert run_on_ranks(2, count, [0.125, 0.25]) == [0.375] * 2  # weights of labels may sum to less


@pytest.mark.lane("test")
@pytest.mark.parametrize(
    ("options", "value", "code", "product"),
    [
        ({"dp_replicate": 3}, -1, "divides", "3"),
        ({"dp_shard": 3}, 3, "world_size", "3"),
        ({"dp_replicate": 2, "dp_shard": 4}, 4, "world_size", "8"),
    ],
)
def test_layouts_that_do_not_fit_are_rejected(
    options: dict[str, Any], value: int, code: str, product: str
) -> None:
    with rejects("dp_shard", value, code) as caught:
        ParallelConfig(**options).axes(4)
    assert {product, "4"} <= set(str(caught.value).split())


@pytest.mark.lane("test")
def test_all_problems_of_a_layout_in_one_error() -> None:
    with pytest.raises(ValueError, match="dp_replicate") as error:
        ParallelConfig(
            dp_replicate=0, dp_shard=0, timeout_seconds=0, start_timeout_seconds=math.inf,
            precision="fp32", reduce_dtype="bf16",
        )  # fmt: skip
    assert len(str(error.value).splitlines()) == 5


def bf16_reduction(reduce_dtype: str) -> dict[str, torch.Tensor]:
    config = ParallelConfig(device=device().type, precision="bf16", reduce_dtype=reduce_dtype)  # type: ignore[arg-type]
    meshes = make_meshes(config)
    model = parallelize(net(), config, meshes)
    part = rows().chunk(meshes.batch_size)[meshes.batch_rank]
    (model(part).float().square().sum() / 8).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())  # type: ignore[union-attr]
    return {n: whole(p.grad) for n, p in model.named_parameters()}


@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
def test_bf16_is_near_and_its_reduction_dtype_matters(reduce_dtype: str) -> None:
    (got, _) = run_on_ranks(2, bf16_reduction, reduce_dtype)
    for name, gradient in reference().items():
        # 8 bits of mantissa over a chain of about 4 matmuls, and the sum of two ranks
        assert (got[name] - gradient).abs().max() / gradient.abs().max() < 6 * 2**-7, name
    exact_in_bf16 = all(torch.equal(g, g.bfloat16().float()) for g in got.values())
    assert exact_in_bf16 == (reduce_dtype == "bf16")


class Picky(nn.Module):
    """A layer that computes in fp32 inside a bf16 model, as a router does."""

    compute_dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 4), 1 + 2**-12))  # lost in bf16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.dtype == torch.float32
        assert x.dtype == torch.bfloat16
        return x.float() @ self.weight.t()


class WithPicky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), Picky())

    def blocks(self) -> list[nn.Module]:
        return [self.block]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.first(x))


def picky() -> tuple[torch.Tensor, torch.Tensor]:
    config = ParallelConfig(device=device().type, precision="bf16")
    torch.manual_seed(0)
    model = parallelize(WithPicky(), config, make_meshes(config))
    out = model(torch.eye(4)[dist.get_rank() :: 2])
    out.sum().backward()
    inner = model.get_parameter("block.1.weight")
    return out.detach(), whole(inner.grad)


@pytest.mark.lane("test")
def test_a_module_with_its_own_dtype_keeps_it() -> None:
    outputs, gradients = zip(*run_on_ranks(2, picky))
    assert outputs[0].dtype == torch.float32
    assert not torch.equal(outputs[0], outputs[0].bfloat16().float())
    assert torch.equal(gradients[0], gradients[1])
    torch.manual_seed(0)
    model = WithPicky()
    hidden = model.block[0](model.first(torch.eye(4)))  # (4, 4)
    wanted = hidden.sum(0).expand(3, 4)
    assert (gradients[0] - wanted).abs().max() <= 4 * 2**-7 * wanted.abs().max()


class Strange(nn.Module):
    """Somebody else's attribute of that name, which is no dtype, on a block."""

    compute_dtype = "bfloat16"

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.block.compute_dtype = torch.float32  # type: ignore[assignment]

    def blocks(self) -> list[nn.Module]:
        return [self.block]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


def strange() -> bool:
    config = ParallelConfig(device=device().type, precision="fp32")
    model = parallelize(Strange(), config, make_meshes(config))
    return bool(model(torch.ones(1, 4)).isfinite().all())


@pytest.mark.slow
def test_an_attribute_that_is_no_dtype_and_a_block_that_has_one() -> None:
    assert run_on_ranks(2, strange) == [True, True]


def timeouts(options: dict[str, int]) -> dict[str, float]:
    """Seconds that each group lets a collective take."""
    config = ParallelConfig(device=device().type, precision="fp32", timeout_seconds=7.0, **options)  # type: ignore[arg-type]
    meshes = make_meshes(config)
    groups = {"host": meshes.host_group, "cp": meshes.cp.group}
    if meshes.pp.size > 1:  # else the whole world, which `start_process_group` makes
        groups["stage"] = meshes.stage.group
    for mesh in filter(None, (meshes.dense, meshes.sparse)):
        groups |= {name: mesh.get_group(name) for name in mesh.mesh_dim_names}
    backends = {n: g._get_backend(torch.device("cpu")) for n, g in groups.items() if g is not None}
    return {name: b.options._timeout.total_seconds() for name, b in backends.items()}


@pytest.mark.parametrize(
    ("options", "axes"),
    [
        ({"dp_replicate": 2, "ep": 2, "dp_shard": 2}, "dp_replicate dp_shard efsdp ep"),
        ({"pp": 2, "cp": 2}, "pp dp_shard cp stage"),
        ({"cp": 2, "tp": 2}, "dp_shard tp efsdp cp"),
    ],
)
def test_every_group_has_the_timeout_of_the_job(options: dict[str, int], axes: str) -> None:
    for found in run_on_ranks(4, timeouts, options):
        assert found == dict.fromkeys(["host", *axes.split()], 7.0)


def broken_axis(name: str) -> str:
    """What a rank is told where the first collective over an axis cannot be made."""
    real = torch.distributed.all_reduce

    def fail(tensor: torch.Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
        if group is not None and torch.distributed.get_world_size(group) == 2:
            raise RuntimeError("connection refused")
        return real(tensor, *args, group=group, **options)

    torch.distributed.all_reduce = fail  # a broken network, which gloo on one host has not
    try:
        make_meshes(ParallelConfig(device=device().type, precision="fp32", **{name: 2}))  # type: ignore[arg-type]
    except RuntimeError as error:
        return str(error)
    finally:
        torch.distributed.all_reduce = real
    return "nothing"


@pytest.mark.lane("test")
@pytest.mark.parametrize("name", ["tp", "cp"])
def test_a_group_that_cannot_communicate_is_named_at_the_start(name: str) -> None:
    for rank, said in enumerate(run_on_ranks(4, broken_axis, name)):
        assert f" {rank}: " in said
        assert "connection refused" in said


class Stacks(torch.nn.Module):
    """Two experts, each token weighed by both."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(
            torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.w.to_local() if hasattr(self.w, "to_local") else self.w
        return (x @ w[0]).relu() + (x @ w[1]).square()


def few_experts() -> tuple[tuple[int, ...], torch.Tensor]:
    config = ParallelConfig(device=device().type, precision="fp32")
    meshes = make_meshes(config)
    model = parallelize(Stacks(), config, meshes)
    shape = tuple(model.w.to_local().shape)  # type: ignore[operator]
    model(torch.arange(32.0).view(4, 8).sin()[meshes.batch_rank :][:1]).sum().backward()
    return shape, whole(model.w.grad)  # type: ignore[arg-type]


def test_fewer_experts_than_ranks_are_sharded_inside() -> None:
    model = Stacks()
    model(torch.arange(32.0).view(4, 8).sin()).sum().backward()
    wanted = model.w.grad
    assert wanted is not None
    for shape, gradient in run_on_ranks(4, few_experts):
        assert shape == (2, 2, 8)
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)


def counted_once() -> float:
    meshes = make_meshes(ParallelConfig(device=device().type, precision="fp32", tp=2))
    return float(global_count(5 + meshes.batch_rank, meshes))


@pytest.mark.lane("test")
def test_ranks_that_read_the_same_rows_count_their_labels_once() -> None:
    assert run_on_ranks(4, counted_once) == [11.0] * 4

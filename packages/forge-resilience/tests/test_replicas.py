"""Flipped bits in copies, shards, moments and buffers are found; what is right never alarms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from forge_resilience import ReplicaCheck, replicas
from forge_resilience.replicas import Mismatch, ReplicasConfig, checksums, training_tensors
from forge_testing import run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

WRAP = 2**64


def slow_checksum(data: bytes) -> int:
    """splitmix64 of each word and its position, in Python."""
    total = len(data)
    data += bytes(-len(data) % 8)
    for i in range(len(data) // 8):
        x = (int.from_bytes(data[8 * i : 8 * i + 8], "little") + i * 0x9E3779B97F4A7C15) % WRAP
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WRAP
        x = (x ^ x >> 27) * 0x94D049BB133111EB % WRAP
        total += x ^ x >> 31
    total %= WRAP
    return total - WRAP if total >= WRAP // 2 else total


def some_tensors() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 8, generator=g)
    return [
        torch.randn(7, 3, generator=g),
        torch.randn(33, generator=g).bfloat16(),
        torch.randn(9, generator=g).to(torch.float8_e4m3fn),
        torch.tensor(3.0),
        torch.empty(0, 4),
        wide.t(),
        wide.bfloat16().flatten()[3:17],  # begins in the middle of a word
        torch.tensor([True, False, True]),
        torch.arange(-4, 4),
        torch.randn(3, dtype=torch.complex64, generator=g),
        torch.full((3,), -0.0),
    ]


@pytest.mark.parametrize("chunk", [1, 3, 2**21])
def test_checksums_are_those_of_a_slow_reference(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_CHUNK", chunk)
    tensors = some_tensors()
    expected = [
        slow_checksum(bytes(t.contiguous().flatten().view(torch.uint8).tolist())) for t in tensors
    ]
    assert checksums(tensors).tolist() == expected


def flip(tensor: Tensor, bit: int, element: int = 0) -> None:
    """One bit of one element of this rank's part, as faulty memory would."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    data = local.detach().view(-1)[element : element + 1].view(torch.uint8)
    data[bit // 8] ^= 1 << bit % 8


def test_each_bit_and_each_exchange_of_elements_is_found() -> None:
    """Also signs of two elements, which cancel in a weighted sum."""
    tensor = torch.randn(6, generator=torch.Generator().manual_seed(0))
    seen = {checksums([tensor]).item()}
    for i in range(6):
        for bit in range(32):
            flip(tensor, bit, i)
            seen.add(checksums([tensor]).item())
            flip(tensor, bit, i)
    pairs = [(i, j) for i in range(6) for j in range(i)]
    for i, j in pairs:
        swapped, negated = tensor.clone(), tensor.clone()
        swapped[[i, j]] = tensor[[j, i]]
        negated[[i, j]] *= -1
        seen |= {checksums([swapped]).item(), checksums([negated]).item()}
    assert len(seen) == 1 + 6 * 32 + 2 * len(pairs)


# ---- on ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.down = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


def trained(shape: tuple[int, ...] | None) -> tuple[Any, Any]:
    """A model after two steps: DDP without a shape, FSDP2 over one or two axes else."""
    torch.manual_seed(7)
    model: Any = Net()
    if shape is None:
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :]))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if shape is not None:
        model.reshard()
    return model, optimizer


def disturb(shape: tuple[int, ...] | None, name: str, rank: int, bit: int) -> list[Any]:
    """What a check says before and after one bit of a rank's tensor is flipped, and after it is right again."""
    model, optimizer = trained(shape)
    tensors = training_tensors(model, optimizer)
    check = ReplicaCheck()
    assert check.compare(tensors) == []
    check.seal(tensors)
    said = []
    for _ in range(2):
        if dist.get_rank() == rank:
            flip(tensors[name], bit)
        said.append(check.compare(tensors))
    check.unseal()
    assert not check.is_sealed
    return said


PLACES = ["module.up.weight", "module.down.bias.exp_avg_sq", "module.norm.running_var", "module.up.weight.step"]  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("name", PLACES)
def test_the_odd_rank_of_three_is_named_under_ddp(name: str) -> None:
    said = run_on_ranks(3, disturb, None, name, 1, 30)
    assert said[0] == said[1] == said[2]
    wrong, right = said[0]
    assert wrong == [
        Mismatch(name, "memory", (1,), (1,)),
        Mismatch(name, "replicas", (1,), (0, 1, 2)),
    ]
    assert str(wrong[1]).startswith(f"{name} of rank 1 ")
    assert str(wrong[1]).endswith(" ranks 0, 1, 2")
    assert right == []


@pytest.mark.distributed
def test_of_two_copies_both_are_named() -> None:
    ((wrong, _), _) = run_on_ranks(2, disturb, None, PLACES[0], 0, 0)
    assert [(m.ranks, m.is_known) for m in wrong] == [((0,), True), ((0, 1), False)]
    assert "ranks 0, 1" in str(wrong[1])


@pytest.mark.slow
@pytest.mark.distributed
def test_copies_under_hsdp_are_those_of_one_shard() -> None:
    said = run_on_ranks(4, disturb, (2, 2), "up.weight.exp_avg", 3, 22)
    expected = [
        Mismatch("up.weight.exp_avg", "memory", (3,), (3,)),
        Mismatch("up.weight.exp_avg", "replicas", (1, 3), (1, 3)),
    ]
    assert [wrong for wrong, _ in said] == [expected] * 4


@pytest.mark.slow
@pytest.mark.distributed
def test_a_shard_has_no_replica_and_differs_only_in_memory() -> None:
    said = run_on_ranks(2, disturb, (2,), "down.weight", 1, 0)
    assert [wrong for wrong, _ in said] == [[Mismatch("down.weight", "memory", (1,), (1,))]] * 2


def placed() -> list[list[str]]:
    """DTensors of a mesh of two axes, each damaged on rank 2, beside a plain tensor that differs by right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    tensors: dict[str, Tensor] = {
        "everywhere": distribute_tensor(torch.ones(4), mesh, [Replicate(), Replicate()]),
        "over tp": distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()]),
        "over dp": distribute_tensor(torch.ones(4), mesh, [Replicate(), Shard(0)]),
        "nowhere": distribute_tensor(torch.ones(4), mesh, [Shard(0), Shard(0)]),
        "a sum": DTensor.from_local(torch.full((4,), float(rank)), mesh, [Partial(), Partial()]),
        "of two": torch.full((2,), float(rank // 2)),
        "of two more": distribute_tensor(torch.full((2,), 0.0), mesh["tp"], [Replicate()]) + rank // 2,
    }  # fmt: skip
    check = ReplicaCheck(plain=mesh["tp"].get_group())
    assert check.compare(tensors) == []
    if rank == 2:
        for tensor in tensors.values():
            flip(tensor, 3)
    return [[m.tensor, *map(str, m.ranks)] for m in check.compare(tensors)]


@pytest.mark.distributed
def test_copies_are_along_the_axes_that_replicate() -> None:
    expected = [
        ["everywhere", "2"],
        ["over dp", "0", "2"],
        ["of two", "2", "3"],
        ["of two more", "2", "3"],
        ["over tp", "2", "3"],
    ]
    assert [sorted(said) for said in run_on_ranks(4, placed)] == [sorted(expected)] * 4


def count_exchanges(damaged: bool) -> tuple[int, int]:
    """Collectives of a comparison, and reads of the device by the host."""
    model, optimizer = trained(None)
    check, calls, reads = ReplicaCheck(), [], []
    if damaged and dist.get_rank() == 1:
        flip(model.module.up.weight, 0)
    check.seal(training_tensors(model, optimizer))
    real, tolist = dist.all_gather, torch.Tensor.tolist

    def all_gather(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return real(*args, **options)

    def counted(tensor: Tensor) -> Any:
        reads.append(tensor.dtype == torch.int64 and tensor.dim() == 1)
        return tolist(tensor)

    dist.all_gather, torch.Tensor.tolist = all_gather, counted  # type: ignore[assignment]
    try:
        check.compare(training_tensors(model, optimizer))
    finally:
        dist.all_gather, torch.Tensor.tolist = real, tolist  # type: ignore[method-assign]
    return len(calls), sum(reads)


@pytest.mark.distributed
def test_a_comparison_costs_two_small_exchanges_and_one_read_of_each_set_of_checksums() -> None:
    assert run_on_ranks(2, count_exchanges, False) == [(2, 1)] * 2
    assert run_on_ranks(2, count_exchanges, True) == [(4, 1)] * 2


class Scaled(torch.Tensor):
    """A tensor made of two others, as an 8-bit moment is."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: type, codes: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Any], types: Any, args: Any, kwargs: Any = None) -> Any:  # fmt: skip
        assert func is torch.ops.aten.detach.default, func
        return cls(args[0].codes, args[0].scale)


def test_a_tensor_of_parts_is_named_by_its_part() -> None:
    moment = Scaled(torch.zeros(4, dtype=torch.uint8), torch.ones(1))
    check = ReplicaCheck()
    check.seal({"m": moment})
    flip(moment.scale, 9)
    assert [m.tensor for m in check.compare({"m": moment})] == ["m.scale"]


def test_what_has_another_shape_than_when_it_was_sealed_is_not_compared() -> None:
    check = ReplicaCheck()
    check.seal({"w": torch.zeros(4), "v": torch.zeros(3)})
    found = check.compare({"w": torch.zeros(2), "v": torch.ones(3)})
    assert [m.tensor for m in found] == ["v"]


def test_a_configuration_names_value_rule_and_fix() -> None:
    with rejects("every_steps", -1, "range"):
        ReplicasConfig(every_steps=-1)

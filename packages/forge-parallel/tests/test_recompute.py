"""Recomputation: the same gradients from less memory, under any backward."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import tensor_models
import torch
import torch.nn.functional as F
from nets import DIM, Layers, Mixer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import forge_parallel.recompute as recompute_file
from forge_parallel.axes.fsdp import apply_fsdp
from forge_parallel.axes.tensor import tensor_parallel
from forge_parallel.axes.vocab import vocab_cross_entropy
from forge_parallel.compile import compile_blocks
from forge_parallel.recompute import _CHANGED, recompute
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


class Block(Mixer):
    """Attention and a feed-forward with dropout; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.rate = 0.1
        self.calls: list[bool] = []  # with or without grad

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls.append(torch.is_grad_enabled())
        x = x + super().forward(x) * scale
        return x + self.down(F.dropout(F.silu(self.up(self.norm(x))), self.rate))


class Net(Layers):
    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        torch.manual_seed(0)
        super().__init__(make() for _ in range(3))


def data() -> Tensor:
    return torch.randn(4, 16, DIM, generator=torch.Generator().manual_seed(1)).to(device())


class Memory:
    """Bytes that autograd and selective recomputation hold, parameters not counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saved: list[Tensor] = []
        self.records: list[Any] = []
        make = recompute_file.selective_contexts

        def selective_contexts() -> Any:
            pair = make()
            self.records.append(pair[0])
            return pair

        monkeypatch.setattr(recompute_file, "selective_contexts", selective_contexts)

    def hooks(self) -> Any:
        def pack(tensor: Tensor) -> Tensor:
            self.saved.append(tensor)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def bytes(self, model: nn.Module) -> int:
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        outputs = [o for r in self.records for calls in r.outputs.values() for o in calls]
        tensors = [*self.saved, *(t for o in outputs for t in recompute_file.tensors_in(o.value))]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(size for address, size in sizes.items() if address not in own)


def gradients(model: nn.Module, halves: bool, memory: Memory | None = None) -> list[Tensor]:
    """Of the input and every parameter; `halves`: in two passes, as zero-bubble schedules do."""
    x = data().requires_grad_()
    torch.manual_seed(2)  # of the dropout
    with memory.hooks() if memory else nullcontext():
        loss = model(x).square().sum()
    parameters = list(model.parameters())
    if not halves:
        return list(torch.autograd.grad(loss, [x, *parameters]))
    first = torch.autograd.grad(loss, [x], retain_graph=True)
    return [*first, *torch.autograd.grad(loss, parameters)]


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_the_same_bits(mode: str, halves: bool) -> None:
    plain, model = Net(), Net()
    names = list(model.state_dict())
    assert recompute(model.blocks(), mode) == 3
    assert list(model.state_dict()) == names
    assert all(isinstance(block, Block) for block in model.layers)
    expected = gradients(plain, halves)
    for got, want in zip(gradients(model, halves), expected, strict=True):
        assert torch.equal(got, want)
    assert [len(block.calls) for block in model.layers] == [3 if halves else 2] * 3
    with torch.no_grad():
        model(data())
    assert [len(block.calls) for block in model.layers] == [4 if halves else 3] * 3


def test_less_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured on the three blocks, in units of one (B, S, D) tensor. Plain: per block the input, its
    norm, q k v (3), attention, out, the middle, its norm, up (4), silu (4), dropout's mask and product
    (4 + 4), about 25. Full: the input alone."""
    saved = {}
    for mode in ("none", "selective", "full"):
        memory = Memory(monkeypatch)
        model = Net()
        recompute(model.blocks(), mode)
        gradients(model, False, memory)
        saved[mode] = memory.bytes(model) / (data().numel() * 4) / 3
    assert 18 < saved["none"] < 28
    assert saved["selective"] < 0.6 * saved["none"]  # 10 products and attention, the input, the lse
    assert saved["full"] < 1.5


def test_every_second_block() -> None:
    model = Net()
    assert recompute(model.blocks(), "full", every=2) == 2
    gradients(model, False)
    assert [len(block.calls) for block in model.layers] == [2, 1, 2]


def test_selective_computes_no_matmul_twice() -> None:
    model = Net()
    recompute(model.blocks(), "selective")
    counted = _Products()
    with counted:
        gradients(model, False)
    # 4 products forward and 8 backward per block, attention once in each
    assert counted.products == 3 * 12
    assert counted.attentions == 3


class _Products(recompute_file.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = self.attentions = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += op.name() in ("aten::mm", "aten::addmm")
        self.attentions += op.name().endswith("flash_attention_for_cpu")
        return op(*args, **(kwargs or {}))


class InPlace(nn.Module):
    """Changes what a product gave."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return F.silu(self.linear(x).mul_(scale))


class Fickle(nn.Module):
    """Computes something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(DIM, DIM), 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.times += 1
        return F.silu(F.silu(self.linear(x[: 5 - self.times])).sum(0, keepdim=True) + x)


def test_settings_with_wrong_results_are_rejected() -> None:
    model = Net(InPlace)
    recompute(model.blocks(), "selective")
    with pytest.raises(RuntimeError, match=r"aten\.mul_"):
        gradients(model, False)
    for mode, message in (("full", "different metadata"), ("selective", r"aten\.\w+")):
        model = Net(Fickle)
        recompute(model.blocks(), mode)
        with pytest.raises(RuntimeError, match=message):
            gradients(model, False)


class Handed(nn.Module):
    """Gives its product away before using it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.bmm(x, self.weight.expand(x.size(0), DIM, DIM))
        return y, F.silu(y)


def test_a_change_after_the_block_is_noticed_too() -> None:
    block = Handed()
    recompute([block], "selective")
    y, z = block(data())
    y.add_(1.0)
    with pytest.raises(RuntimeError, match=re.escape(_CHANGED.partition("{}")[2])):
        (y + z).sum().backward()


def test_contexts_are_entered_around_the_forward_and_each_recomputation() -> None:
    log: list[str] = []

    class Note:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            log.append(f"+{self.name}")

        def __exit__(self, *_: Any) -> None:
            log.append(f"-{self.name}")

    for mode in ("full", "selective"):
        model = Net()
        recompute(model.blocks(), mode, every=3, contexts=lambda: (Note("record"), Note("replay")))  # type: ignore[arg-type, return-value]
        gradients(model, halves=True)
        assert log == ["+record", "-record", *["+replay", "-replay"] * 2]
        log.clear()


def test_a_copy_recomputes_on_its_own_parameters() -> None:
    model = Net()
    recompute(model.blocks(), "full")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    before = [g.clone() for g in gradients(model, False)]
    assert not torch.equal(before[0], gradients(other, False)[0])
    assert torch.equal(before[0], gradients(model, False)[0])


@pytest.mark.parametrize(
    ("arguments", "key", "value", "code"),
    [
        ({"mode": "some"}, "recompute", "some", "unknown"),
        ({"every": 0}, "recompute_every", 0, "range"),
    ],
)
def test_invalid_arguments_are_rejected(
    arguments: dict[str, Any], key: str, value: object, code: str
) -> None:
    with rejects(key, value, code):
        recompute(Net().blocks(), **arguments)


def sharded(mode: str) -> float:
    """Worst relative error of a rank's gradients against one process on all rows."""
    plain, model = Net().to(device()), Net()
    for block in [*plain.layers, *model.layers]:
        block.rate = 0.0
    recompute(model.blocks(), mode)
    apply_fsdp(model, init_device_mesh(device().type, (2,)))
    mine = data().chunk(2)[torch.distributed.get_rank()]
    plain(data()).square().sum().backward()
    model(mine).square().sum().backward()
    worst = 0.0
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is not None
        assert isinstance(q.grad, DTensor)
        error = (q.grad.full_tensor() - p.grad).abs().max() / p.grad.abs().max()
        worst = max(worst, float(error))
    return worst


@pytest.mark.lane("quick")
@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_under_fsdp(mode: str) -> None:
    assert max(run_on_ranks(2, sharded, mode)) < 1e-5


def cut_over_tp(mode: str, compiled: bool, sequence_parallel: bool) -> float:
    """Worst error of gradients under tp 2 and FSDP2 against one process that keeps everything."""
    model = tensor_models.seeded(kinds="aor")
    reference = tensor_models.copy_of(model)
    tokens, labels, ctx = tensor_models.batch(2)
    tensor_models.one_process(reference, tokens, labels, ctx)
    mesh = tensor_models.mesh_of(1, 2)
    tensor_parallel(model, mesh["tp"], sequence_parallel=sequence_parallel)
    recompute(model.blocks(), mode)
    if compiled:
        compile_blocks(model, "aot_eager")
    everywhere = mesh._flatten("everywhere")
    tensor_models.shard(model, mesh["dp_shard"], everywhere)
    axis = SimpleNamespace(group=mesh["tp"].get_group(), size=2, rank=mesh["tp"].get_local_rank())
    total = vocab_cross_entropy(model(tokens, ctx), labels, axis).sum
    (total / (labels != -100).sum()).backward()
    return max(tensor_models.errors(model, reference).values())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mode", "compiled", "sequence_parallel"),
    [
        ("full", False, True),
        ("selective", False, True),
        ("selective", False, False),
        ("none", True, True),
        ("full", True, True),
        ("full", True, False),
    ],
)
def test_under_tensor_parallelism(mode: str, compiled: bool, sequence_parallel: bool) -> None:
    assert max(run_on_ranks(2, cut_over_tp, mode, compiled, sequence_parallel, timeout=120)) < 1e-5

"""Compiled blocks: the same numbers, one compilation for each kind of block."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from nets import DIM, Layers, Mixer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from forge_parallel.axes import collectives
from forge_parallel.axes.blockwise import Tile, Tiling, blockwise_attention
from forge_parallel.axes.fsdp import apply_fsdp
from forge_parallel.axes.tensor import tensor_parallel
from forge_parallel.axes.vocab import vocab_cross_entropy
from forge_parallel.compile import compile_blocks, recompilations
from forge_parallel.recompute import recompute
from forge_testing import device, rank_mesh, run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Experts(nn.Module):
    """Four experts; each token visits the best, so that shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = nn.Linear(DIM, 4, bias=False)
        self.weight = nn.Parameter(torch.randn(4, DIM, DIM) / DIM**0.5)
        self.traced = False

    def forward(self, x: Tensor) -> Tensor:
        self.traced |= torch.compiler.is_compiling()
        scores = self.choice(x).sigmoid()
        out = torch.zeros_like(x)
        for e in range(4):
            rows = (scores.argmax(-1) == e).nonzero(as_tuple=True)
            out = out.index_put(rows, x[rows] @ self.weight[e] * scores[rows][:, e : e + 1])
        return out


class Block(nn.Module):
    def __init__(self, feed_forward: nn.Module) -> None:
        super().__init__()
        self.mixer, self.norm, self.feed_forward = Mixer(), nn.RMSNorm(DIM), feed_forward

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = x + self.mixer(x) * scale
        return x + self.feed_forward(self.norm(x))


class Net(Layers):
    def __init__(self, depth: int = 4, experts: bool = False) -> None:
        torch.manual_seed(0)
        made = [Experts() if experts and i % 2 else Dense() for i in range(depth)]
        super().__init__(Block(feed_forward) for feed_forward in made)


def data(step: int = 0) -> Tensor:
    return torch.randn(2, 16, DIM, generator=torch.Generator().manual_seed(step)).to(device())


def train(model: nn.Module, steps: int = 1) -> list[Tensor]:
    """Gradients of the last of some steps of SGD."""
    parameters = list(model.parameters())
    for step in range(steps):
        loss = model(data(step).requires_grad_()).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients):
                parameter -= 0.1 * gradient
    return list(gradients)


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((f - e).abs().max() / e.abs().max()) for f, e in zip(found, expected, strict=True)
    )


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def since(before: dict[str, int]) -> dict[str, int]:
    return {key: value - before[key] for key, value in recompilations().items()}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_equal_to_eager_and_one_graph_per_kind(mode: str, experts: bool) -> None:
    plain, model = Net(experts=experts), Net(experts=experts)
    names = list(model.state_dict())
    recompute(model.blocks(), mode)
    compile_blocks(model, "aot_eager")
    assert list(model.state_dict()) == names
    before = recompilations()
    expected, found = train(plain, 5), train(model, 5)
    assert worst(found, expected) < 1e-5
    # dense blocks: one kind; with experts also the mixer and the norm as parts of the other
    assert since(before)["graphs"] == (3 if experts else 1)
    assert not any(m.traced for m in model.modules() if isinstance(m, Experts))


@pytest.mark.lane("quick")
def test_without_grad_nothing_is_compiled() -> None:
    model = compile_blocks(Net(), "aot_eager")
    train(model)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    before = recompilations()
    with torch.no_grad():
        for length in range(1, 12):
            x = data()[:, :length]
            assert torch.equal(model(x), plain(x))
    assert since(before) == {"graphs": 0, "recompiled": 0}


@pytest.mark.slow
def test_a_new_shape_is_counted_and_the_old_one_stays() -> None:
    model = compile_blocks(Net(), "aot_eager")
    model(data().requires_grad_())
    before = recompilations()
    model(data()[:, :8].contiguous().requires_grad_())
    assert since(before) == {"graphs": 1, "recompiled": 1}
    model(data().requires_grad_())
    assert since(before) == {"graphs": 1, "recompiled": 1}


class Numbered(nn.Module):
    """A block whose code depends on its number, so that every one is a kind of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        assert torch.compiler.is_compiling()
        return x + self.linear(x) * (1 + self.number)


@pytest.mark.slow
def test_more_kinds_than_torch_expects_are_all_compiled() -> None:
    model = Net(depth=0)
    model.layers = nn.ModuleList([Numbered(i) for i in range(12)])
    train(compile_blocks(model, "aot_eager"))  # uncompiled, a block fails


def saved_bytes(model: nn.Module) -> int:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(data().requires_grad_())
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for address, size in sizes.items() if address not in own)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_memory_budget_is_kept_and_changes_no_number() -> None:
    free = saved_bytes(compile_blocks(Net(), "aot_eager"))
    model = compile_blocks(Net(), "aot_eager", memory_budget=0.3)
    inputs = 4 * data().numel() * 4  # of the blocks: kept under any budget
    assert saved_bytes(model) - inputs < 0.3 * free
    assert worst(train(model), train(Net())) < 1e-5


@pytest.mark.slow
def test_a_copy_runs_on_its_own_parameters() -> None:
    model = compile_blocks(Net(), "aot_eager")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    x = data().requires_grad_()
    assert torch.equal(other(x), x)
    assert not torch.equal(model(x), x)


def test_invalid_arguments_are_rejected() -> None:
    with rejects("memory_budget", 1.5, "range"):
        compile_blocks(Net(), memory_budget=1.5)
    model = Net()
    recompute(model.blocks(), "selective")
    with rejects("recompute", "selective", "excludes"):
        compile_blocks(model)


def sharded(mode: str) -> tuple[float, dict[str, int]]:
    """Worst error of gradients under FSDP2 against one eager process, and compilations after step 1."""
    plain, model = Net(experts=True), Net(experts=True)
    recompute(model.blocks(), mode)
    compile_blocks(model, "aot_eager")
    apply_fsdp(model, init_device_mesh(device().type, (2,)))
    rank = torch.distributed.get_rank()
    error, before = 0.0, {}
    for step in range(3):
        for net, x in ((plain, data(step)), (model, data(step)[rank : rank + 1])):
            net.zero_grad()
            net(x.requires_grad_()).square().sum().backward()
        before = before or recompilations()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert isinstance(q.grad, DTensor)
            error = max(error, worst([q.grad.full_tensor()], [p.grad]))  # type: ignore[list-item]
    return error, since(before)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["none", "full"])
def test_under_fsdp(mode: str) -> None:
    for error, again in run_on_ranks(2, sharded, mode, timeout=120.0):
        assert error < 1e-5
        assert again == {"graphs": 0, "recompiled": 0}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor() -> None:
    plain, model = Net(depth=2), Net(depth=2)
    recompute(model.blocks(), "full", every=2)
    compile_blocks(model)
    assert worst(train(model), train(plain)) < 1e-5


def blockwise(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (4, -1))  # (B, S, H, D)
    return blockwise_attention(heads, heads * 0.5, heads + 1, PLAN).flatten(-2)


PLAN = Tiling([[Tile(None, 0, 16, 0, 16, True)]])


def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
    """Of a layer before a function, which then gets no leaf; by columns, which weigh differently."""
    weight = torch.eye(DIM).requires_grad_()
    out = function(data() @ weight)
    if out.dim():
        out = (out * torch.linspace(1, 2, out.size(-1))).sum()
    return torch.autograd.grad(out, weight)[0]


def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, backend="eager")


def across_ranks() -> dict[str, float]:
    """Error of the compiled gradient of each function that communicates, against the eager one."""
    mesh = rank_mesh((2,), ("tp",))
    ranks = collectives.NamedGroup.of(mesh)
    labels = torch.arange(2 * 16).view(2, 16) % (2 * DIM)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "copy": lambda x: collectives.copy(x, ranks),
        "reduce": lambda x: collectives.reduce(x, ranks),
        "gather": lambda x: collectives.gather(x, ranks, 1),
        "scatter": lambda x: collectives.scatter(x, ranks, 1),
        "cut": lambda x: collectives.split(x, ranks, 1),
        "join": lambda x: collectives.gather_replicated(x, ranks, 1),
        "vocab": lambda x: vocab_cross_entropy(x, labels, mesh).sum,
    }
    return {name: worst([gradient(compiled(f))], [gradient(f)]) for name, f in functions.items()}


@pytest.mark.slow
@pytest.mark.distributed
def test_F123_compiled_gradients_over_ranks_are_those_of_eager() -> None:
    for errors in run_on_ranks(2, across_ranks):
        assert max(errors.values()) <= 1e-5, errors


class Parted(Dense):
    def parallel_roles(self) -> dict[str, str]:
        return {"up.*": "colwise", "down.*": "rowwise"}


def with_budget_over_ranks() -> float:
    """Error of the gradients of a block over two ranks that is compiled to keep half of its activations."""
    torch.manual_seed(0)
    plain, block = nn.Sequential(Dense()), Parted()
    block.load_state_dict(plain[0].state_dict())
    tensor_parallel(block, rank_mesh((2,), ("tp",)), sequence_parallel=False)
    compile_blocks(block, "aot_eager", memory_budget=0.5)
    for net in (plain, block):
        net(data()).square().sum().backward()
    whole = [p.grad.full_tensor() for p in block.parameters()]  # type: ignore[union-attr]
    return worst(whole, [p.grad for p in plain.parameters()])  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
def test_F215_a_memory_budget_goes_with_meshes_in_the_graph() -> None:
    """torch has no size for them, and ended step 1 of every job with tp and a budget."""
    assert max(run_on_ranks(2, with_budget_over_ranks)) <= 1e-5


@pytest.mark.lane("quick")
def test_F123_compiled_gradients_of_chunks_are_those_of_eager() -> None:
    assert worst([gradient(compiled(blockwise))], [gradient(blockwise)]) <= 1e-5

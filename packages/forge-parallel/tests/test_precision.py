"""One process in bf16 computes bit by bit what FSDP2 computes on one rank.

The reference is FSDP2's own mixed precision over a mesh of one rank.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forge_core import Transformer, TransformerConfig, cross_entropy
from forge_parallel import ParallelConfig, parallelize
from forge_parallel.axes import precision, reshard
from forge_parallel.meshes import make_meshes, with_one_rank
from forge_testing.traffic import Traffic

SHAPE = dict(vocab_size=64, dim=32, num_layers=2, num_heads=2)
TOKENS = torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(0))


class Planted(Exception):
    pass


def fail(*_: object) -> None:
    raise Planted


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Scorer(nn.Module):
    """Scores in fp32, as routers do."""

    compute_dtype = torch.float32

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        assert self.inner.weight.dtype == torch.float32
        return self.inner(x.float()).sigmoid().to(x.dtype)


class Checkpointed(nn.Module):
    """Recomputes by itself a layer whose nonlinearity is saved."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down, self.scorer = nn.Linear(dim, dim), nn.Linear(dim, dim), Scorer(dim)

    def forward(self, x: Tensor, ctx: object = None) -> Tensor:
        return checkpoint(
            lambda y: self.down(self.up(y).tanh()) * self.scorer(y), x, use_reentrant=False
        )


def plain(**options: object) -> Callable[[], nn.Module]:
    return lambda: Transformer(TransformerConfig(**SHAPE, **options))  # type: ignore[arg-type]


def checkpointed() -> nn.Module:
    return Transformer(TransformerConfig(**SHAPE), feed_forward=lambda _: Checkpointed(32))


MODELS = {"plain": plain(), "tied": plain(tie_embeddings=True), "checkpointed": checkpointed}


def both(make: Callable[[], nn.Module], **options: object) -> list[nn.Module]:
    """FSDP2 on one rank, and one process."""
    config = ParallelConfig(precision="bf16", device="cpu", **options)  # type: ignore[arg-type]
    models = []
    for fsdp in (True, False):
        meshes = make_meshes(config)
        torch.manual_seed(0)
        models.append(
            parallelize(make(), config, with_one_rank(config, meshes) if fsdp else meshes)
        )
    assert hasattr(models[0], "unshard")
    assert not hasattr(models[1], "unshard")
    return models


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]


def loss_of(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).sum / 24


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}], ids=["", "recompute"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_and_updates_are_those_of_fsdp2(
    name: str, options: dict[str, str]
) -> None:
    models = both(MODELS[name], **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in models]
    for _ in range(3):
        for micro_batch in TOKENS.split(1):
            losses = [loss_of(m, micro_batch) for m in models]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
        named = [dict(m.named_parameters()) for m in models]
        for key, theirs in named[0].items():
            ours = named[1][key]
            assert type(ours) is nn.Parameter
            assert ours.grad is not None
            assert ours.dtype == ours.grad.dtype == torch.float32
            assert torch.equal(full(theirs.grad), ours.grad), key
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for theirs, ours in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(full(theirs), ours)


def test_casts_are_kept_without_gradients_until_a_parameter_changes() -> None:
    _, model = both(plain())
    with torch.no_grad():
        before = model(TOKENS)
        kept = dict(model._forge_casts.kept)
        assert torch.equal(model(TOKENS), before)
        assert all(model._forge_casts.kept[p][1] is cast for p, (_, cast) in kept.items())
        model.lm_head.weight.mul_(2)
        changed = model(TOKENS)
        assert not torch.equal(changed, before)
        model.lm_head.weight.data.mul_(0.5)
        reshard(model)
        assert torch.equal(model(TOKENS), before)
    loss_of(model).backward()
    assert not model._forge_casts.kept


@pytest.mark.parametrize("name", ["plain", "checkpointed"])
def test_casts_end_with_the_backward_of_their_forward(name: str) -> None:
    _, model = both(MODELS[name])
    seen: list[weakref.ref[Tensor]] = []
    model.lm_head.register_forward_hook(lambda m, *_: seen.append(weakref.ref(m.weight)))
    losses = [loss_of(model), loss_of(model, TOKENS.flip(0))]
    assert all(cast() is not None for cast in seen)
    while losses:
        losses.pop(0).backward()
    assert [cast() for cast in seen] == [None, None]


def test_parameters_and_their_gradients_are_cast_in_one_call_each_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call for each parameter would be a kernel for each; one that is frozen, or as large as a batch, has its own."""
    calls = []
    for batch in (precision.BATCH, 1):
        monkeypatch.setattr(precision, "BATCH", batch)
        _, model = both(plain())
        model.embedding.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
        with Traffic() as traffic:
            loss_of(model).backward()
        calls.append(traffic.calls)
    assert [found["_foreach_copy_"] for found in calls] == [2, 0]
    trained = sum(p.requires_grad for p in model.parameters())
    assert calls[1]["_to_copy"] - calls[0]["_to_copy"] == 2 * trained


class WithoutGradient(torch.autograd.Function):
    """A function of a tensor and a weight that has no gradient for the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Unreached(nn.Module):
    """A linear layer, and a parameter that the graph contains and no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unreached = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return WithoutGradient.apply(self.used(x), self.unreached)  # type: ignore[no-any-return, no-untyped-call]


def test_a_parameter_that_no_gradient_reaches_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "BATCH", 1)  # else it is cast together with others
    model = precision.compute_in(Unreached(), torch.bfloat16)
    model(torch.ones(2, 4)).float().sum().backward()
    assert model.unreached.grad is None
    assert model.used.weight.grad is not None


def test_parameters_are_back_after_an_error() -> None:
    _, model = both(plain())
    parameters = dict(model.named_parameters())
    handle = model.lm_head.register_forward_hook(fail)
    with pytest.raises(Planted):
        model(TOKENS)
    handle.remove()
    assert all(parameters[name] is p for name, p in model.named_parameters())

    loss = loss_of(model)
    handle = model.layers["0"].mixer.q_proj.weight.register_hook(fail)
    with pytest.raises(Planted):
        loss.backward()
    handle.remove()
    loss_of(model)
    assert all(parameters[name] is p for name, p in model.named_parameters())


@pytest.mark.parametrize(
    "options", [{"param_dtype": "bf16"}, {"reduce_dtype": "bf16"}, {"cpu_offload": True}]
)
def test_other_settings_of_one_process_use_fsdp2(options: dict[str, object]) -> None:
    config = ParallelConfig(precision="bf16", device="cpu", **options)  # type: ignore[arg-type]
    assert hasattr(parallelize(plain()(), config), "unshard")


def test_a_frozen_parameter_in_16_bits_uses_fsdp2() -> None:
    model = plain()()
    model.embedding.to(torch.bfloat16).requires_grad_(False)  # type: ignore[union-attr, operator]
    assert hasattr(parallelize(model, ParallelConfig(precision="bf16", device="cpu")), "unshard")

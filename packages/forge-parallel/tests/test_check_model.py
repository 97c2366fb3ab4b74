"""Models that a layout would compute wrongly are refused before anything is changed, on every rank alike."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from forge_parallel import ParallelConfig, accumulate, global_grad_norm, make_meshes, parallelize
from forge_parallel.check_model import model_problems, ranks_with_other_values
from forge_testing import device, run_on_ranks
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

ROLES = {"*emb.*": "vocab", "layers.*": "opaque", "norm.*": "sequence", "head.*": "sharded_logits"}


class Net(nn.Module):
    """Embedding, four blocks, norm and head, which say what they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16, bias=False)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def pipeline_parts(self) -> dict[str, Any]:
        return {"first": ("emb",), "blocks": "layers", "last": ("norm", "head")}

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if tokens.is_floating_point() else self.emb(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x if self.norm is None else self.head(self.norm(x))


def tied() -> Net:
    net = Net()
    net.head.weight = net.emb.weight
    return net


def one_block_four_times() -> Net:
    net = Net()
    net.layers = nn.ModuleList([nn.Linear(8, 8)] * 4)
    return net


def a_bias_in_two_blocks() -> Net:
    net = Net()
    net.layers[1].bias = net.layers[0].bias
    return net


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return x @ weight.sum(0).to(x.dtype)


def experts() -> Net:
    net = Net()
    net.layers = nn.ModuleList(Stack() for _ in range(2))
    return net


def experts_beside_their_router() -> Net:
    net = experts()
    for layer in net.layers:
        layer.router = nn.Linear(8, 4)
    return net


def no_blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8))


def dropout() -> Net:
    net = Net()
    for layer in net.layers:
        layer.after = nn.Dropout(0.1)
    return net


def dropout_in_a_function() -> Net:
    net = Net()
    net.layers[2].attn_dropout = 0.2
    return net


EXPERTS = {**ROLES, "layers.*": "expert"}
BESIDE = {
    **{row: role for row, role in ROLES.items() if row != "layers.*"},
    "layers.*.router.*": "replicate_sum_grad",
    "layers.?.weight": "expert",
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Any, tuple[str, Any, str]]] = {
    "ends tied by assignment": (tied, {"pp": 2}, None, ("emb.weight", ..., "shared")),
    "a-block-used-four-times-in-a-pipeline": (
        one_block_four_times, {"pp": 2}, None, ("layers.0.weight", ..., "shared")),
    "a-parameter-of-two-blocks": (a_bias_in_two_blocks, {}, None, ("layers.0.bias", ..., "shared")),
    "experts on no rank of ep": (experts, {"ep": 2}, EXPERTS, ("ep", 2, "experts")),
    "ep without experts": (Net, {"ep": 2}, ROLES, ("ep", 2, "experts")),
    "experts beside a router": (
        experts_beside_their_router, {"tp": 2}, BESIDE, ("layers.0.weight", ..., "module")),
    "F89 dropout under tp": (dropout, {"tp": 2}, ROLES, ("layers.0.after.p", 0.1, "dropout")),
    "F89 dropout of a function under tp": (
        dropout_in_a_function, {"tp": 2}, ROLES, ("layers.2.attn_dropout", 0.2, "dropout")),
    "recomputation without blocks": (
        no_blocks, {"recompute": "full"}, None, ("recompute", "full", "blocks")),
}  # fmt: skip


NUMBERED = {f"layers.{i}.*": "opaque" for i in range(4)}
NUMBERED |= {row: role for row, role in ROLES.items() if row != "layers.*"}
SUITED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Any]] = {
    "a block used four times, in one unit": (one_block_four_times, {}, None),
    "tied by assignment, in one unit": (tied, {}, None),
    "tied-by-assignment-with-a-role-for-each-name": (tied, {"tp": 2}, ROLES),
    "dropout without tp": (dropout, {}, ROLES),
    "one pattern for all blocks": (Net, {"pp": 2, "tp": 2}, ROLES),
    "a-pattern-for-each-block-of-which-a-stage-has-some": (Net, {"pp": 2, "tp": 2}, NUMBERED),
}  # fmt: skip
UNKNOWN_ROW = (Net, {"pp": 2, "tp": 2}, {**NUMBERED, "gone.*": "opaque"})


def refusal(make: Callable[[], nn.Module], layout: Any, roles: Any) -> ValueError | None:
    """The error of a model and a layout; a model that is not accepted is as it was."""
    config = ParallelConfig(device=device().type, precision="fp32", **layout)
    meshes, model = make_meshes(config), make()
    before = {name: id(p) for name, p in model.named_parameters()}
    try:
        parallelize(model, config, meshes, roles=roles)
    except ValueError as error:
        assert {name: id(p) for name, p in model.named_parameters()} == before
        return error
    return None


@pytest.mark.distributed
@pytest.mark.parametrize("kind", REFUSED)
def test_invalid_arguments_are_rejected(kind: str) -> None:
    for error in run_on_ranks(2, refusal, *REFUSED[kind][:3]):
        assert_problem(error, *REFUSED[kind][3])
        assert len(error.problems) == 1  # those of several layers are one
        assert ("3 more" in error.problems[0].fix) == (kind == "F89 dropout under tp")


@pytest.mark.distributed
@pytest.mark.parametrize("kind", SUITED)
def test_every_rank_lists_its_own_rows(kind: str) -> None:
    ranks = 4 if "pp" in SUITED[kind][1] else 2
    assert run_on_ranks(ranks, refusal, *SUITED[kind]) == [None] * ranks


@pytest.mark.distributed
def test_a_row_that_fits_nothing_is_rejected_by_every_rank() -> None:
    for error in run_on_ranks(4, refusal, *UNKNOWN_ROW):
        assert_problem(error, "gone.*", ..., "not_found")


def half(precision: str) -> tuple[set[torch.dtype], torch.dtype]:
    model = Net().bfloat16()
    model.norm.float()
    config = ParallelConfig(device=device().type, precision=precision)  # type: ignore[arg-type]
    parallelize(model, config, make_meshes(config))
    return {p.dtype for p in model.parameters()}, model(
        torch.zeros(2, 3, dtype=torch.int64, device=device())
    ).dtype


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_comes_in_bf16_is_updated_in_fp32(ranks: int) -> None:
    assert run_on_ranks(ranks, half, "fp32")[0] == ({torch.float32}, torch.float32)
    assert run_on_ranks(ranks, half, "bf16")[0] == ({torch.float32}, torch.bfloat16)


class Adapted(nn.Module):
    """A frozen layer in bf16 with a trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.adapter = nn.Linear(8, 8), nn.Linear(8, 8)
        self.base.bfloat16().requires_grad_(False)

    def blocks(self) -> list[nn.Module]:
        return [self]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x)) + self.adapter(x)


def frozen_base(precision: str) -> tuple[set[torch.dtype], set[torch.dtype], float]:
    config = ParallelConfig(device=device().type, precision=precision)
    alone, model = (
        Adapted().float().to(device()),
        parallelize(Adapted(), config, make_meshes(config)),
    )
    rows = torch.ones(2, 8, device=device())
    for net in (alone, model):
        net(rows).float().square().sum().backward()
    (got,) = [model.adapter.weight.grad]
    got = (
        got.full_tensor() / got.device_mesh.size() if isinstance(got, DTensor) else got
    )  # all ranks have the same rows
    error = (got - alone.adapter.weight.grad).abs().max() / alone.adapter.weight.grad.abs().max()
    dtypes = ({p.dtype for p in part.parameters()} for part in (model.base, model.adapter))
    return *dtypes, float(error)


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_F113_a_frozen_base_stays_in_16_bits(ranks: int, precision: str) -> None:
    for base, adapter, error in run_on_ranks(ranks, frozen_base, precision):
        assert base == {torch.bfloat16}
        assert adapter == {torch.float32}
        assert error <= (1e-5 if precision == "fp32" else 5e-2)


def warned(offers: bool) -> list[str]:
    config = ParallelConfig(device=device().type, precision="bf16")
    model: Any = nn.Sequential(nn.Linear(100, 100, bias=False))
    if offers:
        model.blocks = lambda: list(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(model, config, make_meshes(config))
    return [str(each.message) for each in caught if "blocks()" in str(each.message)]


@pytest.mark.distributed
def test_F113_a_model_that_is_gathered_at_once_is_warned_of() -> None:
    (said,), others = run_on_ranks(2, warned, False)
    assert others == []
    assert {"Sequential", "2e-05", "bf16"} <= set(re.split(r"[ ,;]+", said))
    assert run_on_ranks(2, warned, True) == [[], []]


def half_experts() -> list[torch.dtype]:
    """Of experts that lie on the ranks of ep already: the dtypes of parameter, its part and its gradient."""
    config = ParallelConfig(device=device().type, ep=2)
    meshes, model = make_meshes(config), experts()
    for layer in model.layers:
        part = layer.weight.detach().bfloat16().chunk(2)[meshes.rank]
        layer.weight = nn.Parameter(DTensor.from_local(part, meshes.sparse["ep"], [Shard(0)]))
    parallelize(model, config, meshes, roles=EXPERTS)
    model.layers[0](torch.ones(2, 8, device=device())).sum().backward()
    weight = model.layers[0].weight
    return [weight.dtype, weight.to_local().dtype, weight.grad.to_local().dtype]


@pytest.mark.distributed
def test_experts_that_come_in_bf16_are_updated_in_fp32() -> None:
    assert run_on_ranks(2, half_experts) == [[torch.float32] * 3] * 2


def test_a_layout_not_chosen_and_ranks_not_initialized_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rejects("layout", "auto", "auto"):
        make_meshes(ParallelConfig(device=device().type, layout="auto"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with rejects("WORLD_SIZE", "2", "group"):
        make_meshes(ParallelConfig(device=device().type))


class Blocks(nn.Module):
    """A container in the place of the method, as in many models."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


def wrapped() -> list[str]:
    config = ParallelConfig(device=device().type)
    model = parallelize(Blocks(), config, make_meshes(config))
    model(torch.ones(2, 8, device=device())).sum().backward()
    return [type(block).__name__ for block in model.blocks]


@pytest.mark.distributed
def test_ranks_with_other_values_are_named() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    digests: list[str] = []
    for each in (model, other):
        assert ranks_with_other_values(each, lambda own: digests.append(own) or [own]) == []
    assert ranks_with_other_values(model, lambda own: [own, digests[1], own, digests[0]]) == [1]


def test_blocks_may_be_a_list_of_modules() -> None:
    assert run_on_ranks(2, wrapped)[0] == ["FSDPLinear"] * 2


def largest(bad: int) -> float:
    import torch.distributed as dist

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    part = torch.full((2,), math.nan if dist.get_rank() == bad else 1.0, device=device())
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2, device=device()), mesh, [Shard(0)]))
    parameter.grad = DTensor.from_local(part, mesh, [Shard(0)])
    return float(global_grad_norm([parameter], math.inf)[0])


@pytest.mark.slow
@pytest.mark.distributed
def test_a_nan_of_any_rank_is_in_the_maximum() -> None:
    for bad in range(3):
        assert all(math.isnan(norm) for norm in run_on_ranks(3, largest, bad))
    assert run_on_ranks(3, largest, -1) == [1.0] * 3


class Sometimes(nn.Module):
    """Its middle block is left out at times, as pictures are in some batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))

    def blocks(self) -> list[nn.Module]:
        return [self.first, self.middle, self.last]

    def forward(self, x: Tensor, middle: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + torch.tanh(self.middle(x)) if middle else x)


STEPS = [(True, False), (True, True), (False, False), (True, False)]


def gradients(model: nn.Module, rank: int, ranks: int) -> list[dict[str, Tensor | None]]:
    """Of each step of two micro-batches, in which the middle is used as STEPS says."""
    found: list[dict[str, Tensor | None]] = []
    for step, used in enumerate(STEPS):
        rows = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step)).to(device())
        for micro, middle in enumerate(used):
            accumulate(model, last=micro == 1)
            model(rows[micro].chunk(ranks)[rank], middle).square().sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        found.append(
            {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
        )
        model.zero_grad()
    return found


def spread(layout: dict[str, int]) -> list[dict[str, Tensor | None]]:
    config = ParallelConfig(device=device().type, precision="fp32", **layout)  # type: ignore[arg-type]
    meshes = make_meshes(config)
    model = parallelize(Sometimes(), config, meshes)
    return gradients(model, meshes.batch_rank, meshes.batch_size)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", [{}, {"dp_replicate": 2}, {"dp_replicate": 4}], ids=str)
def test_a_block_that_the_last_micro_batch_leaves_out_keeps_its_gradients(
    layout: dict[str, int],
) -> None:
    wanted = gradients(Sometimes(), 0, 1)
    for got in run_on_ranks(4, spread, layout):
        for mine, theirs in zip(got, wanted, strict=True):
            for name, gradient in theirs.items():
                if gradient is None:
                    assert mine[name] is None, name
                else:
                    torch.testing.assert_close(mine[name], gradient, rtol=1e-5, atol=1e-5)


def left_out_in_part(layout: dict[str, int]) -> dict[str, Tensor | None]:
    config = ParallelConfig(device=device().type, precision="fp32", **layout)  # type: ignore[arg-type]
    model, rows = Sometimes(), torch.ones(2, 8, device=device())
    model.middle.spare = nn.Parameter(torch.ones(2))  # never gets a gradient
    model = parallelize(model, config, make_meshes(config))
    for last in (False, True):
        accumulate(model, last=last)
        model(rows, not last).sum().backward()
    grads = {n: p.grad for n, p in model.middle.named_parameters()}
    return {n: None if g is None else g.full_tensor() for n, g in grads.items()}


@pytest.mark.slow
@pytest.mark.distributed
def test_a_block_left_out_with_a_parameter_that_is_never_used_is_summed_over_copies() -> None:
    for plain, copies in zip(
        *(run_on_ranks(2, left_out_in_part, layout) for layout in ({}, {"dp_replicate": 2})),
        strict=True,
    ):
        assert plain["spare"] is None
        assert copies["spare"] is None
        torch.testing.assert_close(copies["weight"], plain["weight"])


def with_a_parameter_that_is_never_used(layout: dict[str, int]) -> Tensor:
    """The gradient of the embedding, which FSDP2 reduces last, as tokens need no gradient."""
    config = ParallelConfig(device=device().type, precision="fp32", **layout)  # type: ignore[arg-type]
    meshes, net = make_meshes(config), Net()
    net.spare = nn.Parameter(torch.ones(2))
    model = parallelize(net, config, meshes)
    tokens = (
        torch.arange(16, device=device()).view(4, 4).chunk(meshes.batch_size)[meshes.batch_rank]
    )
    for micro, rows in enumerate(tokens.chunk(2)):
        accumulate(model, last=micro == 1)
        model(rows).square().sum().backward()
    return model.emb.weight.grad.full_tensor()


@pytest.mark.distributed
def test_a_parameter_that_is_never_used_hinders_no_sum_over_copies() -> None:
    (plain, _), (copies, _) = (
        run_on_ranks(2, with_a_parameter_that_is_never_used, layout)
        for layout in ({}, {"dp_replicate": 2})
    )
    torch.testing.assert_close(copies, plain)


def test_a_full_model_is_checked_without_a_process_group() -> None:
    model, config = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), ParallelConfig(tp=2)
    assert model_problems(model, ParallelConfig(), ParallelConfig().axes(2)) == []
    assert model_problems(model, config, config.axes(2))
    parallel = ParallelConfig(cp=2)
    found = model_problems(Net(), parallel, parallel.axes(2), seq_len=6)
    assert ("seq_len", "divides", 6) in [(p.key, p.code, p.value) for p in found]

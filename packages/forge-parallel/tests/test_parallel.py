"""One process, on the code path of many: masters stay fp32, numbers stay right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from nets import Stack
from torch import nn
from torch.distributed.tensor import DTensor

from forge_parallel import (
    ParallelConfig,
    clip_grad_norm_,
    end_process_group,
    parallelize,
    select_device,
)
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


class Net(Stack):
    """Two blocks between two layers; `blocks` as the runner's models offer it."""

    def __init__(self) -> None:
        super().__init__(8, 16, 4)


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    end_process_group()
    assert not dist.is_initialized()


def fill(model: nn.Module) -> nn.Module:
    """The same numbers whatever the layout."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(torch.randn(local.shape, generator=generator) / 4)
    return model


def gradients(
    precision: str, meta: bool = True, parts: int = 1
) -> tuple[Net, dict[str, torch.Tensor]]:
    with torch.device("meta" if meta else "cpu"):
        net = Net()
    config = ParallelConfig(device="cpu", precision=precision)  # type: ignore[arg-type]
    model = fill(parallelize(net, config))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for part in x.chunk(parts):
        (model(part).float().square().sum() / 6).backward()
    full = {
        n: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        for n, p in model.named_parameters()
    }
    return net, full  # type: ignore[return-value]


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[n] - b[n]).abs().max() / b[n].abs().max()) for n in b)


def test_fp32_wraps_nothing() -> None:
    model = parallelize(Net(), ParallelConfig(device="cpu", precision="fp32"))
    assert type(model) is Net
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert not dist.is_initialized()


def test_bf16_computes_in_bf16_over_fp32_masters() -> None:
    net, grads = gradients("bf16")
    assert net.seen == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in net.parameters())
    assert all(g.dtype == torch.float32 for g in grads.values())


@pytest.mark.parametrize("parts", [1, 3])
def test_bf16_gradients_are_those_of_fp32_within_bf16_rounding(parts: int) -> None:
    # bf16 keeps 8 bits: 2^-8 per operation over a chain of about 4 matmuls
    _, reference = gradients("fp32")
    _, grads = gradients("bf16", parts=parts)
    assert worst(grads, reference) < 4 * 2**-7


def test_meta_and_plain_models_end_alike() -> None:
    for precision in ("fp32", "bf16"):
        _, meta = gradients(precision)
        _, plain = gradients(precision, meta=False)
        assert all(torch.equal(meta[n], plain[n]) for n in plain)


class Tied(nn.Module):
    """A head that is the embedding, around a block that is given a table beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.block = TableBlock()
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def blocks(self) -> list[nn.Module]:
        return [self.block]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens), torch.linspace(0, 1, 4)))


class TableBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        self.seen += [x.dtype, table.dtype]
        return self.linear((x * table).to(x.dtype))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_F11_tied_weights_stay_tied(precision: Literal["bf16", "fp32"]) -> None:
    with torch.device("meta"):
        model = Tied()
    fill(parallelize(model, ParallelConfig(device="cpu", precision=precision)))
    names = [name for name, _ in model.named_parameters()]
    assert names == ["embedding.weight", "block.linear.weight", "block.linear.bias"]
    model(torch.arange(6)[None]).float().square().sum().backward()
    assert model.head.weight is model.embedding.weight
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_block_gets_its_fp32_tables_as_they_are() -> None:
    model = Tied()
    parallelize(model, ParallelConfig(device="cpu", precision="bf16"))
    model(torch.arange(6)[None])
    assert model.block.seen == [torch.bfloat16, torch.float32]


def test_tensors_with_values_keep_them_next_to_tensors_on_meta() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, device="meta"))
    model[0].running_mean.fill_(3.0)
    parallelize(model, ParallelConfig(device="cpu", precision="fp32"))
    assert model[0].running_mean.tolist() == [3.0, 3.0]
    assert model[0].weight.tolist() == [1.0, 1.0]
    assert model[1].weight.device.type == "cpu"


def test_an_existing_group_is_used_and_not_destroyed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallelize(Net(), ParallelConfig(device="cpu", precision="bf16"))
    end_process_group()
    assert dist.is_initialized()
    dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_norm_is_global_and_clipping_hits_it(precision: str) -> None:
    net, grads = gradients(precision)
    exact = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    norm = clip_grad_norm_(net.parameters(), exact / 3)
    assert type(norm) is torch.Tensor
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    assert float(clip_grad_norm_(net.parameters())) == pytest.approx(exact / 3, rel=1e-5)


def test_a_norm_below_the_limit_changes_no_bit() -> None:
    net, grads = gradients("fp32")
    before = {n: g.clone() for n, g in grads.items()}
    clip_grad_norm_(net.parameters(), 1e9)
    assert all(torch.equal(grads[n], before[n]) for n in grads)


def test_no_gradient_at_all_has_norm_zero_and_nan_is_shown() -> None:
    net = Net()
    assert float(clip_grad_norm_(net.parameters(), 1.0)) == 0.0
    net.first.weight.grad = torch.full_like(net.first.weight, float("nan"))
    assert math.isnan(float(clip_grad_norm_(net.parameters(), 1.0)))


def test_F83_the_device_is_never_assumed() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert select_device("auto").type == expected
    assert select_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        with rejects("device", "cuda", "requires"):
            select_device("cuda")
    with rejects("device", "tpu", "unknown"):
        select_device("tpu")


def test_all_problems_of_a_config_come_at_once() -> None:
    with rejects("device", "tpu", "unknown") as caught:
        ParallelConfig(device="tpu", precision="fp61")  # type: ignore[arg-type]
    assert [p.key for p in caught.value.problems] == ["device", "precision"]


def test_max_norm_must_be_positive() -> None:
    with rejects("max_norm", 0, "range"):
        clip_grad_norm_([], 0)

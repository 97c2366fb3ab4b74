"""Norm and noise of gradients by block, beside a loop that differentiates each micro-batch by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_parallel import ParallelConfig, end_process_group, make_meshes, parallelize
from forge_parallel.gradient_statistics import GradientStatistics

pytestmark = pytest.mark.lane("test")


class Net(nn.Module):
    """Two blocks, and an embedding whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


SIZES = (3, 5, 1, 7)  # labels of each micro-batch


def micro_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(11, (2, n), generator=generator)) for n in SIZES]


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens), labels, reduction="sum") / sum(SIZES)


def expected() -> dict[str, float]:
    """The formulas of the module's docstring, from h_i."""
    model, total = make_net(), sum(SIZES)
    names = {"0": "layers.0.", "1": "layers.1.", "rest": "embedding."}
    found: dict[str, float] = {}
    parts = []
    for tokens, labels in micro_batches():
        model.zero_grad()
        (loss_of(model, tokens, labels) * total / len(labels)).backward()
        parts.append({n: p.grad.double().clone() for n, p in model.named_parameters()})
    for part, prefix in names.items():
        own = [n for n in parts[0] if n.startswith(prefix)]
        flat = [torch.cat([h[n].flatten() for n in own]) for h in parts]
        shares = [n / total for n in SIZES]
        whole = sum(w * h for w, h in zip(shares, flat))
        big = float(whole @ whole)
        small = sum(w * w * float(h @ h) for w, h in zip(shares, flat))
        signal = (big - small) / (1 - sum(w * w for w in shares))
        noise = (big - signal) * total  # S, of one label
        snr = signal / (noise / total) if min(signal, noise) > 0 else math.nan
        values = {"norm": math.sqrt(big), "signal": signal, "snr": snr}
        values["noise_scale"] = noise / signal if min(signal, noise) > 0 else math.nan
        found |= {f"gradient.{part}.{name}": value for name, value in values.items()}
    return found


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    """bf16, the default, begins a group of one rank."""
    yield
    end_process_group()


@pytest.mark.parametrize("bf16", [False, True])
def test_estimates_are_those_of_a_loop_over_micro_batches(bf16: bool) -> None:
    """bf16 wraps the model with FSDP2, on one rank too."""
    config = ParallelConfig(device="cpu", precision="bf16" if bf16 else "fp32")
    meshes = make_meshes(config)
    model = parallelize(make_net(), config, meshes)
    statistics = GradientStatistics(model, meshes)
    with statistics.watch():
        for tokens, labels in micro_batches():
            loss_of(model, tokens, labels).backward()
    found = statistics.columns(statistics.take(SIZES).tolist())
    wanted = expected()
    assert found.keys() == wanted.keys()
    assert wanted["gradient.1.snr"] > 0  # so that the ratios are looked at
    for name, value in wanted.items():
        if bf16 and not name.endswith("norm"):
            continue  # a difference of nearly equal numbers, with three digits each
        assert found[name] == pytest.approx(value, rel=2e-2 if bf16 else 1e-5, nan_ok=True), name
    # nothing stays behind
    before = dict(statistics._squares)
    loss_of(model, *micro_batches()[0]).backward()
    assert all(statistics._squares[part] is before[part] for part in before)


def test_noise_needs_two_micro_batches() -> None:
    config = ParallelConfig(device="cpu")
    statistics = GradientStatistics(make_net(), make_meshes(config))
    sums: list[Any] = [4.0, 1.0, 9.0, 4.0, 1.0, 9.0, 16.0, 256.0]
    found = statistics.columns(sums)
    assert found["gradient.0.norm"] == 2.0
    assert math.isnan(found["gradient.0.signal"])
    assert math.isnan(found["gradient.rest.noise_scale"])


def test_the_noise_scale_of_known_noise() -> None:
    """A model whose gradient is its data, of mean 1 and variance 4 in each of 1000 dims: S is 4000, |g|^2 is 1000."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1000, 1, bias=False))
    statistics = GradientStatistics(model, make_meshes(ParallelConfig(device="cpu")))
    with statistics.watch():
        for _ in range(8):
            (model(1 + 2 * torch.randn(16, 1000)).sum() / 128).backward()
    found = statistics.columns(statistics.take([16.0] * 8).tolist())
    assert found["gradient.rest.noise_scale"] == pytest.approx(4.0, rel=0.1)
    assert found["gradient.rest.snr"] == pytest.approx(128 / 4.0, rel=0.1)

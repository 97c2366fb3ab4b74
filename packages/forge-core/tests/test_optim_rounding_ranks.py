"""Weights and moments in bf16 on real ranks: each layout rounds as one process does, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_core.optim import EMAConfig, MuonConfig, OptimizerConfig, build_optimizer
from forge_core.optim.rounding import in_fp32, offset_of
from forge_testing import device, run_on_ranks

pytestmark = pytest.mark.distributed

#: World size, mesh, and the dims that its axes cut: of matrices, and of stacks (E, in, out). None is a copy,
#: "strided" what FSDP makes of a dim that tp has cut. Sizes are odd, so shards are uneven.
LAYOUTS: dict[str, tuple[int, tuple[int, ...], Any, Any]] = {
    "fsdp": (2, (2,), (0,), (0,)),
    "fsdp_columns": (2, (2,), (1,), (2,)),
    "fsdp_empty_shards": (4, (4,), (0,), (0,)),
    "tp": (2, (2,), (1,), (1,)),
    "ep": (2, (2,), (None,), (0,)),
    "hsdp": (4, (2, 2), (None, 0), (None, 1)),
    "efsdp_ep": (4, (2, 2), (0, 1), (1, 0)),
    "fsdp_tp": (4, (2, 2), ("strided", 0), (1, 2)),
    "fsdp_tp_rows": (4, (2, 2), (0, 1), (2, 1)),
}
SHAPES = {"w": (12, 7), "tall": (5, 3), "experts": (3, 4, 6), "norm": (9,)}


def _values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}


class Net(nn.Module):
    def __init__(self, cut: Any = lambda tensor: tensor) -> None:
        super().__init__()
        made = {n: nn.Parameter(cut(value.bfloat16())) for n, value in _values(0).items()}
        self.layers = nn.ModuleList([nn.ParameterDict(made)])


class Cut:
    """Tensors on the mesh of a layout."""

    def __init__(self, layout: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        _, sizes, self.matrix, self.stack = LAYOUTS[layout]
        self.mesh = init_device_mesh(device().type, sizes, mesh_dim_names=("a", "b")[: len(sizes)])

    def __call__(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.placement_types import _StridedShard

        dims: Any = self.stack if tensor.ndim == 3 else self.matrix
        if tensor.ndim == 1:
            dims = (0, *[None] * (self.mesh.ndim - 1))
        if "strided" not in dims or tensor.shape[0] % 4:
            dims = [0 if d == "strided" else d for d in dims]
            if tensor.ndim == 2 and tensor.shape[0] % 4 and dims == [0, 0]:
                dims = [None, 0]
            places = [Replicate() if d is None else Shard(d) for d in dims]
            return distribute_tensor(tensor, self.mesh, places)
        inner = distribute_tensor(tensor, self.mesh["b"], [Shard(0)])
        outer = distribute_tensor(inner.to_local(), self.mesh["a"], [Shard(0)])
        own = [_StridedShard(0, split_factor=self.mesh.size(1)), Shard(0)]
        return DTensor.from_local(
            outer.to_local(), self.mesh, own, shape=tensor.shape, stride=tensor.stride()
        )


def _write(parameter: Tensor, values: Tensor) -> Tensor:
    """Store fp32 values in a bf16 parameter of this layout."""
    from forge_core._shared.shards import local_tensor

    offset = offset_of(parameter, "w", 3)
    for own, piece in in_fp32(
        [local_tensor(parameter)], [local_tensor(values)], offset, torch.tensor(7.0)
    ):
        own.copy_(piece)
    return parameter


def rounded_on_ranks(layout: str) -> dict[str, Tensor]:
    cut = Cut(layout)
    found = {}
    for name, values in _values(1).items():
        with torch.no_grad():
            kept = cut(torch.zeros_like(values, dtype=torch.bfloat16))
            found[name] = _write(kept, cut(values)).full_tensor()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_draws_the_bits_of_one_process(layout: str) -> None:
    for found in run_on_ranks(LAYOUTS[layout][0], rounded_on_ranks, layout):
        for name, values in _values(1).items():
            kept = _write(torch.zeros_like(values, dtype=torch.bfloat16), values)
            assert torch.equal(found[name], kept), name
            assert not torch.equal(kept, values.bfloat16())


def _config(name: str) -> OptimizerConfig:
    own = {"muon": MuonConfig(ns_dtype="fp32")} if name == "muon" else {}
    return OptimizerConfig(
        name, lr=0.02, weight_decay=0.3, state_dtype="bf16", ema=EMAConfig(0.9), **own
    )


def trained(layout: str | None, name: str, steps: int = 3) -> dict[str, Tensor]:
    """Weights, averages and moments after updates by the same gradients."""
    cut: Any = (lambda tensor: tensor) if layout is None else Cut(layout)
    model = Net(cut)
    optimizer = build_optimizer(model, _config(name), seed=5)
    for step in range(steps):
        for at, gradient in _values(10 + step).items():
            model.layers[0][at].grad = cut(gradient.bfloat16())
        optimizer.step()
    optimizer.eval()
    found: dict[str, Any] = dict(model.named_parameters())
    for at, slots in optimizer.named_state().items():
        found |= {f"{at}.{s}": v for s, v in slots.items() if isinstance(v, Tensor)}
    return {
        at: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
        for at, value in found.items()
    }


@pytest.mark.parametrize(
    "name", ["adamw", pytest.param("lion", marks=[pytest.mark.slow, pytest.mark.lane("ci")])]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_have_the_bits_of_one_process(layout: str, name: str) -> None:
    expected = trained(None, name)
    for found in run_on_ranks(LAYOUTS[layout][0], trained, layout, name):
        for at, value in expected.items():
            assert torch.equal(found[at], value), at


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "efsdp_ep"])
def test_updates_of_muon_differ_only_by_the_matmuls(layout: str) -> None:
    """An orthogonalized matrix differs in its last bits, which rarely changes how a weight is rounded."""
    expected = trained(None, "muon")
    for found in run_on_ranks(LAYOUTS[layout][0], trained, layout, "muon"):
        for at, value in expected.items():
            assert (found[at] != value).float().mean() < 0.05, at
            torch.testing.assert_close(found[at], value, rtol=2**-7, atol=1e-6)

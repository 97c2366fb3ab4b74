"""Tables of ids over tp and FSDP2's shards: torch must know which part of them a rank has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_parallel.axes.fsdp import apply_fsdp
from forge_parallel.axes.tensor import tensor_parallel
from forge_parallel.rules import offsets_are_right
from forge_testing import device, run_on_ranks
from forge_testing.problems import assert_problem

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]
DIM, SIZES = 24, (*range(5, 30), 61, 67, 97)
ROLES = {"table.*": "vocab", "head.*": "sharded_logits"}


class Ends(nn.Module):
    """A table whose numbers are their own places, and a head with a bias."""

    def __init__(self, vocab: int, dim: int = DIM, bias: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab, bias=bias)
        with torch.no_grad():
            self.table.weight.copy_(numbers(vocab, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(tokens))
        return logits

    def blocks(self) -> list[nn.Module]:
        return []


def numbers(vocab: int, dim: int) -> Tensor:
    return torch.arange(float(vocab * dim), device=device()).view(vocab, dim)


def _config(tp: int) -> ParallelConfig:
    return ParallelConfig(device=device().type, precision="fp32", tp=tp, sequence_parallel=False)


def misplaced(tp: int) -> tuple[list[int], list[int]]:
    """The sizes for which this rank has other numbers than torch says, and those sharded by width."""
    config = _config(tp)
    meshes = make_meshes(config)
    wrong, by_width = [], []
    for vocab in SIZES:
        model = parallelize(Ends(vocab), config, meshes, roles=ROLES)
        weight: Any = model.get_parameter("table.weight")
        shape, offset = compute_local_shape_and_global_offset(
            weight.shape, weight.device_mesh, weight.placements
        )
        said = numbers(vocab, DIM)[
            tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        ]
        if not torch.equal(said, weight.to_local()) or not torch.equal(
            weight.full_tensor(), numbers(vocab, DIM)
        ):
            wrong.append(vocab)
        if Shard(1) in weight.placements:
            by_width.append(vocab)
    return wrong, by_width


@pytest.mark.slow
@pytest.mark.parametrize(("world", "tp"), [(4, 2), (6, 2), (6, 3), (8, 2)])
def test_a_dtensor_has_the_part_of_a_table_of_its_rank(world: int, tp: int) -> None:
    found = run_on_ranks(world, misplaced, tp)
    assert not {vocab for wrong, _ in found for vocab in wrong}
    expected = [v for v in SIZES if not offsets_are_right(v, tp, world // tp)]
    assert all(by_width == expected for _, by_width in found)
    assert bool(expected) == (world // tp > 2)


def _refused(how: str) -> ValueError | None:
    config = _config(2)
    meshes = make_meshes(config)
    model = Ends(13, 20) if how == "width" else Ends(13, bias=True)
    try:
        if how == "step by step":
            tensor_parallel(model, meshes.dense["tp"], roles=ROLES, sequence_parallel=False)
            apply_fsdp(model, meshes.fsdp(meshes.dense))
        else:
            parallelize(model, config, meshes, roles=ROLES)
    except ValueError as error:
        return error
    return None


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("how", "key"), [("width", "table"), ("bias", "head.bias"), ("step by step", "rows")]
)
def test_tables_that_can_be_sharded_neither_way_are_rejected(how: str, key: str) -> None:
    for error in run_on_ranks(6, _refused, how):
        assert_problem(error, key, 13, "shards")
        assert "14" in error.problems[0].fix.split()

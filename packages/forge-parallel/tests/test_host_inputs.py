"""What a model reads on the host is not moved by FSDP2. No accelerator here: torch's own mover runs, with
the meta device for a target."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_testing import run_on_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.cpu_only(reason="an accelerator is simulated by meta tensors"),
    pytest.mark.lane("test"),
]


class Reader(nn.Module):
    """Remembers where its inputs lie."""

    host_inputs = ("document_ids",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[str] = []

    def forward(self, tokens: Tensor, *, positions: Tensor, document_ids: Tensor) -> Tensor:
        self.seen = [t.device.type for t in (tokens, positions, document_ids)]
        return self.linear(torch.ones(2, 4, dtype=self.linear.weight.dtype))


def devices(names: tuple[str, ...]) -> list[str]:
    """Where tokens, positions and document ids are when forward sees them."""
    from torch.distributed.fsdp._fully_shard import _fsdp_state
    from torch.distributed.utils import _to_kwargs

    reader = Reader()
    reader.host_inputs = names  # type: ignore[assignment]
    config = ParallelConfig(device="cpu")
    model = parallelize(reader, config, make_meshes(config))
    ids = torch.zeros(2, 4, dtype=torch.int64)
    model(ids, positions=ids, document_ids=ids)
    assert reader.seen == ["cpu"] * 3
    model._get_fsdp_state()._device = torch.device("cuda")  # type: ignore[operator, union-attr]
    move = lambda args, kwargs, _, side: _to_kwargs(args, kwargs, torch.device("meta"), side)  # noqa: E731
    with patch.object(_fsdp_state, "_to_kwargs", move):
        model(ids, positions=ids, document_ids=ids)
    return reader.seen


def test_what_the_host_reads_is_not_moved_to_the_accelerator() -> None:
    for seen in run_on_ranks(2, devices, ("document_ids",)):
        assert seen == ["meta", "meta", "cpu"]
    for seen in run_on_ranks(2, devices, ()):
        assert seen == ["meta"] * 3

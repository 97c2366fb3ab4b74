"""A step makes a few pieces beside parameters and state, however large the model: bytes, counted as on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from forge_core.optim import EMAConfig, OptimizerConfig, base, build_optimizer
from forge_testing.live_bytes import LiveBytes

pytestmark = pytest.mark.lane("test")

PIECE = 1000


class Model(nn.Module):
    """Two matrices of many pieces, one that no view makes flat, and many small vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        matrices = [torch.randn(120, 80), torch.randn(80, 120).T, torch.randn(70, 30)]
        self.tensors = nn.ParameterList([*matrices, *(torch.randn(90) for _ in range(100))])


CONFIGS = {
    "lion": OptimizerConfig("lion"),
    "ema": OptimizerConfig(ema=EMAConfig(0.9)),
    "schedule_free": OptimizerConfig("schedule_free_adamw"),
}


def steps(config: OptimizerConfig, skips: bool) -> tuple[list[Tensor], int]:
    """Weights after two steps, and the peak of the second in bytes."""
    model = Model()
    optimizer = build_optimizer(model, config)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        with LiveBytes() as seen:
            optimizer.step(skip=torch.tensor(0.0) if skips else None)
    return list(model.parameters()), seen.peak


@pytest.mark.lane("quick")
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_temporaries_of_a_step_are_bounded_by_chunks(
    name: str, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = steps(CONFIGS[name], skips)
    monkeypatch.setattr(base, "_on_cpu", lambda row: False)
    monkeypatch.setattr(base, "_LARGE_PIECE", PIECE)
    cut, peak = steps(CONFIGS[name], skips)
    for one, other in zip(plain, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    # up to four copies of a piece; numbers of 103 parameters beside them
    assert peak <= 4 * 4 * PIECE + 4 * 4 * 4 * 103, peak


def test_a_chunk_of_a_gpu_has_many_rows_and_lists_of_columns() -> None:
    rows = [(torch.empty(size, device="meta"),) * 2 for size in (2**23, 2**22, 7, 2**25 + 5, 3)]
    sizes = [[t.numel() for t in column] for column, _ in base.pieces(rows)]
    assert sizes == [[2**23, 2**22, 7], [2**24], [2**24], [5, 3]]
    assert not list(base.pieces([]))

"""`parallel.sdpa` chooses the kernel of torch's attention, and what the device has not is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from forge_parallel import ParallelConfig, launch
from forge_parallel._shared.problems import ProblemError
from forge_parallel.rules import sdpa_problem
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def kernel() -> str:
    q = torch.randn(1, 2, 8, 16)
    with Called() as called:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return "flash" if any("flash" in name for name in called.names) else "math"


def test_a_kernel_is_chosen_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, wanted in (("auto", "flash"), ("math", "math"), ("flash", "flash")):
        with launch(ParallelConfig(device="cpu", precision="fp32", sdpa=name)):
            assert kernel() == wanted
        assert kernel() == "flash"


def test_backends_that_the_device_lacks_are_rejected_before_a_group_starts() -> None:
    with (
        rejects("sdpa", "cudnn", "device"),
        launch(ParallelConfig(device="cpu", sdpa="cudnn")),
    ):
        pass
    with rejects("sdpa", "math", "excludes"):
        ParallelConfig(device="cpu", sdpa="math", cp=2)
    cuda = torch.device("cuda")
    problem = sdpa_problem("flash", cuda, "fp32")
    assert problem is not None
    assert_problem(ProblemError([problem]), "sdpa", "flash", "precision")
    assert sdpa_problem("flash", cuda, "bf16") is None
    assert sdpa_problem("efficient", cuda, "fp32") is None


@pytest.fixture
def deterministic() -> Iterator[Callable[..., None]]:
    yield partial(torch.use_deterministic_algorithms, True)
    torch.use_deterministic_algorithms(False)


def test_cudnn_is_left_out_under_deterministic_algorithms(
    monkeypatch: pytest.MonkeyPatch, deterministic: Callable[..., None]
) -> None:
    """Its backward adds in any order; asked for by name, torch's own setting says whether to warn or to raise."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    enabled, cuda = torch.backends.cuda.cudnn_sdp_enabled, torch.device("cuda")
    for warn_only in (None, True, False):
        if warn_only is not None:
            deterministic(warn_only=warn_only)
        with launch(ParallelConfig(device="cpu", precision="fp32")):
            assert enabled() == (warn_only is None)
        assert enabled()
        problem = sdpa_problem("cudnn", cuda, "bf16")
        assert (problem is None) == (warn_only is not False)
    assert problem is not None
    assert_problem(ProblemError([problem]), "sdpa", "cudnn", "deterministic")

"""The order of the steps: each refuses to come after a later one, and why it has to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from forge_parallel.axes.local import add_mixin
from forge_parallel.compile import compile_blocks
from forge_parallel.float8 import convert_float8
from forge_parallel.order import STEPS, OrderError, mark
from forge_parallel.recompute import recompute

pytestmark = pytest.mark.lane("test")


class Summed:
    """Stands for a layer cut over ranks: its output is added up over two of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = super().forward(x)  # type: ignore[misc]
        return part + part


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))


@pytest.mark.parametrize("step", STEPS)
def test_F15_a_step_after_a_later_one_is_refused(step: str) -> None:
    for later in STEPS[STEPS.index(step) + 1 :]:
        net = model()
        mark(net, later)
        with pytest.raises(OrderError, match=f"{step} must come before {later}"):
            mark(net, step)
        mark(net[0], "fsdp") if later != "fsdp" else None
    net = model()
    mark(net, step)
    with pytest.raises(OrderError, match="do it once"):
        mark(net, step)


def test_F15_float8_after_tensor_parallelism_would_lose_the_communication() -> None:
    """The proof that the order matters: torchao's swap, called on layers that tensor parallelism has
    changed, runs without a complaint and leaves out the sum over ranks."""
    torchao = pytest.importorskip("torchao.float8")
    x = torch.randn(4, 32)
    config = torchao.Float8LinearConfig(emulate=True)

    right = torchao.convert_to_float8_training(model(), config=config)
    add_mixin(right[2], Summed)
    wrong = model()
    add_mixin(wrong[2], Summed)
    torchao.convert_to_float8_training(wrong, config=config)
    assert torch.allclose(right(x), 2 * wrong(x))  # half of the answer, no error

    refused = model()
    add_mixin(refused[2], Summed)
    mark(refused, "tensor")
    with pytest.raises(OrderError) as error:
        convert_float8(refused, min_dim=16)
    assert (error.value.step, error.value.after) == ("float8", "tensor")


def test_steps_of_this_package_leave_their_marks() -> None:
    pytest.importorskip("torchao")
    net = model()
    recompute([net[0]], "full")
    with pytest.raises(OrderError, match="float8 must come before recompute"):
        convert_float8(net, min_dim=16)
    net = model()
    compile_blocks(net, "eager")
    with pytest.raises(OrderError, match="recompute must come before compile"):
        recompute([net[2]], "full")


def test_a_mark_on_a_part_counts_and_state_is_left_alone() -> None:
    net = model()
    before = list(net.state_dict())
    mark(net[2], "compile")
    with pytest.raises(OrderError, match="tensor must come before compile"):
        mark(net, "tensor")
    mark(net[0], "tensor")  # another part
    assert list(net.state_dict()) == before
    with pytest.raises(OrderError, match="tensor must come before compile"):
        mark(copy.deepcopy(net), "tensor")


def test_stages_may_share_what_has_no_parameters() -> None:
    shared = nn.Dropout()
    first, second = nn.Sequential(nn.Linear(2, 2), shared), nn.Sequential(nn.Linear(2, 2), shared)
    for stage in (first, second):
        mark(stage, "tensor")
        mark(stage, "fsdp")
    with pytest.raises(OrderError):
        mark(first, "fsdp")

"""The order of the steps: each refuses to come after a later one, and why it has to."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from forge_parallel.axes.local import add_mixin
from forge_parallel.compile import compile_blocks
from forge_parallel.float8 import convert_float8
from forge_parallel.recompute import recompute
from forge_parallel.structure import STEPS, OrderError, mark

pytestmark = pytest.mark.lane("test")


class Summed:
    """Stands for a layer cut over ranks: its output is added up over two of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = super().forward(x)  # type: ignore[misc]
        return part + part


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))


@contextmanager
def out_of_order(step: str, after: str) -> Iterator[None]:
    """Expect the OrderError of `step` after `after`."""
    with pytest.raises(OrderError) as caught:
        yield
    assert (caught.value.step, caught.value.after) == (step, after)
    assert after in str(caught.value)


@pytest.mark.parametrize("step", STEPS)
def test_F15_a_step_after_a_later_one_is_rejected(step: str) -> None:
    for later in STEPS[STEPS.index(step) + 1 :]:
        net = model()
        mark(net, later)
        with out_of_order(step, later):
            mark(net, step)
        mark(net[0], "fsdp") if later != "fsdp" else None
    net = model()
    mark(net, step)
    with out_of_order(step, step):
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
    with out_of_order("float8", "tensor"):
        convert_float8(refused, min_dim=16)


def test_steps_of_this_package_leave_their_marks() -> None:
    pytest.importorskip("torchao")
    net = model()
    recompute([net[0]], "full")
    with out_of_order("float8", "recompute"):
        convert_float8(net, min_dim=16)
    net = model()
    compile_blocks(net, "eager")
    with out_of_order("recompute", "compile"):
        recompute([net[2]], "full")


def test_a_mark_on_a_submodule_counts_and_state_is_kept() -> None:
    net = model()
    before = list(net.state_dict())
    mark(net[2], "compile")
    with out_of_order("tensor", "compile"):
        mark(net, "tensor")
    mark(net[0], "tensor")  # another part
    assert list(net.state_dict()) == before
    with out_of_order("tensor", "compile"):
        mark(copy.deepcopy(net), "tensor")


def test_stages_may_share_what_has_no_parameters() -> None:
    shared = nn.Dropout()
    first, second = nn.Sequential(nn.Linear(2, 2), shared), nn.Sequential(nn.Linear(2, 2), shared)
    for stage in (first, second):
        mark(stage, "tensor")
        mark(stage, "fsdp")
    with out_of_order("fsdp", "fsdp"):
        mark(first, "fsdp")

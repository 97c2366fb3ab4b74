"""Class swapping, and modules that see their own part of a DTensor."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

from forge_parallel.axes.local import add_mixin, use_local
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


class Twice:
    def forward(self, x):
        return 2 * super().forward(x)


def test_swapped_module_is_still_what_it_was():
    linear, other = nn.Linear(3, 2), nn.Linear(3, 2)
    names, x = list(linear.state_dict()), torch.ones(1, 3)
    before = linear(x)
    add_mixin(linear, Twice)
    add_mixin(other, Twice)
    assert type(linear) is type(other)
    assert isinstance(linear, nn.Linear)
    assert torch.equal(linear(x), 2 * before)
    assert list(linear.state_dict()) == names


def test_use_local_rejects_tensors_that_are_no_parameter():
    with rejects("name", "scale", "not_found"):
        use_local(nn.Linear(2, 2), "scale")


def _local_weight():
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    tp, found = mesh["tp"], {}
    for name, placements in (("one", None), ("sum", (Partial(),))):
        norm = nn.RMSNorm(4)
        weight = DTensor.from_local(torch.ones(4), tp, [Replicate()], run_check=False)
        norm.register_parameter("weight", nn.Parameter(weight))
        use_local(norm, "weight", placements)
        assert type(norm.weight) is torch.Tensor
        fully_shard(norm, mesh=mesh["dp"])
        norm.set_gradient_divide_factor(1.0)
        norm.set_force_sum_reduction_for_comms(True)
        seen = []
        norm.register_forward_hook(lambda module, *_, seen=seen: seen.append(type(module.weight)))
        factor = 1.0 + 2.0 * tp.get_local_rank()
        (norm(torch.ones(1, 4)) * factor).sum().backward()
        assert seen == [torch.Tensor]
        assert list(norm.state_dict()) == ["weight"]
        found[name] = norm._parameters["weight"].grad.full_tensor().tolist()
    return found


def test_gradients_of_a_copy_add_up_if_they_are_partial():
    for rank in run_on_ranks(4, _local_weight):
        assert rank["sum"] == pytest.approx([8.0] * 4)  # 2 dp x (1 + 3) over tp
        assert rank["one"][0] in (pytest.approx(2.0), pytest.approx(6.0))  # own rank's alone

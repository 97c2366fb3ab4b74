"""Norms and states of a model whose experts lie on two ranks are those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

from forge_moe import MoE, MoEConfig, expert_grad_norm, expert_parallelize, load_full_state
from forge_testing import device, run_on_ranks
from forge_testing.problems import assert_problem, rejects

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]
TOKENS = 12


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    moe = MoE(MoEConfig(dim=8, hidden_dim=16, num_experts=4, bias=True, expert_bias=True))
    model = nn.Sequential(nn.Linear(8, 8), moe)
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.normal_(tensor, std=0.5)
    return model.to(device())


def tokens() -> torch.Tensor:
    return torch.randn(TOKENS, 8, generator=torch.Generator().manual_seed(7)).to(device())


def backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()
    for parameter in model.parameters():
        if not isinstance(parameter.grad, DTensor) and len(x) < TOKENS:
            dist.all_reduce(parameter.grad)


def clipped(efsdp: bool) -> tuple[float, float, float, bool]:
    """(norm, what torch says, the largest difference of clipped gradients) of two or four ranks."""
    alone, model = build(), build()
    backward(alone, tokens())
    wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device().type, (ranks // 2, 2), mesh_dim_names=("efsdp", "ep"))
    expert_parallelize(model, mesh["ep"])
    if efsdp:
        fully_shard(model[1].experts, mesh=mesh["efsdp"])
        model[1].experts.set_gradient_divide_factor(1.0)
        model[1].experts.set_force_sum_reduction_for_comms(True)
    backward(model, tokens().chunk(ranks)[dist.get_rank()])
    norm = expert_grad_norm(model, mesh["ep"])
    bits = [torch.zeros_like(norm) for _ in range(ranks)]
    dist.all_gather(bits, norm)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm, foreach=False)
    pairs = zip(model.parameters(), alone.parameters())
    worst = max(float((_full(mine.grad) - theirs.grad).abs().max()) for mine, theirs in pairs)
    return float(norm), float(wanted), worst, all(torch.equal(norm, other) for other in bits)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("efsdp", [False, True])
def test_the_norm_over_dense_and_expert_gradients_is_that_of_one_process(efsdp: bool) -> None:
    for norm, wanted, worst, same in run_on_ranks(4 if efsdp else 2, clipped, efsdp):
        assert norm == pytest.approx(wanted, rel=1e-5)
        assert worst < 1e-6
        assert same


def refused() -> None:
    mesh = init_device_mesh(device().type, (2,), mesh_dim_names=("ep",))
    model = build()
    for one in (mesh["ep"], "ep"):
        with rejects("mesh", one, "missing"):
            expert_grad_norm(model, one)
    expert_parallelize(model, mesh["ep"])
    summed = model[1].experts.up_proj
    summed.grad = DTensor.from_local(summed.full_tensor(), mesh["ep"], [Partial()])
    with rejects("1.experts.up_proj", ..., "partial"):
        expert_grad_norm(model, mesh["ep"])
    summed.grad = None
    whole = build(1).state_dict()
    whole["1.experts.up_proj"] = whole["1.experts.up_proj"][:2]  # as a rank holds it
    whole["1.gate"] = whole.pop("0.bias")
    whole["0.weight"] = [1.0]
    before = {name: _full(value).clone() for name, value in model.state_dict().items()}
    with rejects("0.bias", ..., "missing", where="load_full_state") as caught:
        load_full_state(model, whole)
    assert all(torch.equal(_full(v), before[n]) for n, v in model.state_dict().items())
    for problem in (
        ("0.weight", "list", "type"),
        ("1.experts.up_proj", (2, 8, 16), "shape"),
        ("1.gate", ..., "unknown"),
    ):
        assert_problem(caught.value, *problem)
    assert len(caught.value.problems) == 4

    both = init_device_mesh(device().type, (1, 2), mesh_dim_names=("efsdp", "ep"))
    wrapped = expert_parallelize(build(), both["ep"])
    fully_shard(wrapped[1].experts, mesh=both["efsdp"])
    with rejects("1.experts.up_proj", ..., "fsdp"):
        load_full_state(wrapped, build(1).state_dict())


def test_mismatched_keys_are_listed_and_nothing_changes() -> None:
    run_on_ranks(2, refused)


def loaded() -> bool:
    mesh, whole = init_device_mesh(device().type, (2,), mesh_dim_names=("ep",)), build(1)
    model = expert_parallelize(build(), mesh["ep"])
    load_full_state(model, whole.state_dict())
    state = model.state_dict()
    return all(torch.equal(_full(state[n]), value) for n, value in whole.state_dict().items())


def test_a_full_state_goes_into_experts_on_ranks() -> None:
    assert all(run_on_ranks(2, loaded))


def test_a_full_state_goes_into_a_model_on_one_process_and_not_onto_meta() -> None:
    model, whole = build(), build(1).state_dict()
    load_full_state(model, whole)
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    with rejects("0.weight", ..., "meta"):
        load_full_state(build().to("meta"), whole)


class WithExtraState(torch.nn.Module):
    """A module whose state has an entry that is not a tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


def test_extra_state_is_not_loaded() -> None:
    with rejects("_extra_state", ..., "extra"):
        load_full_state(WithExtraState(), {"_extra_state": {"calls": 4}})

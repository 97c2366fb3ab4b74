"""Checkpoints of expert-parallel layers: all experts, on any number of ranks (F31)."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from forge_ckpt import Store
from forge_moe import MoE, MoEConfig, expert_parallelize
from forge_testing import device, run_on_ranks

pytestmark = pytest.mark.distributed

# name -> (efsdp, ep, options)
LAYOUTS = {
    "ep 1": (1, 1, {}),
    "ep 2": (1, 2, {}),
    "ep 4": (1, 4, {}),
    "ep 4 in two nodes": (1, 4, {"dispatcher": "hierarchical", "ranks_per_node": 2}),
    "efsdp 2 x ep 2": (2, 2, {}),
    "alone": (1, 1, None),
}


def build(layout, seed=0):
    """A router with a bias buffer and 8 experts on the layout, and AdamW."""
    efsdp, ep, options = LAYOUTS[layout]
    torch.manual_seed(seed)
    config = MoEConfig(
        dim=16, hidden_dim=24, num_experts=8, top_k=2, router="sigmoid_topk", bias_update_rate=1e-3
    )
    moe = MoE(config)
    moe.router.expert_bias.copy_(torch.randn(8) * 0.01)
    moe.to(device())
    if options is not None:
        mesh = init_device_mesh(device().type, (efsdp, ep), mesh_dim_names=("efsdp", "ep"))
        expert_parallelize(moe, mesh["ep"], **options)
        if efsdp > 1:
            fully_shard(moe.experts, mesh=mesh["efsdp"])
            moe.experts.set_gradient_divide_factor(1.0)
            moe.experts.set_force_sum_reduction_for_comms(True)
    return moe, torch.optim.AdamW(moe.parameters(), lr=1e-2, eps=1e-4)


def step(moe, optimizer, seed=5):
    """One step on this rank's share of eight tokens."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 16, generator=g).to(device())
    x = x.chunk(dist.get_world_size())[dist.get_rank()]
    y = moe(x)
    y.square().sum().backward()
    for parameter in moe.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()


def whole(moe, optimizer):
    """Every parameter, buffer and moment as plain full tensors; collective."""
    full = {f"model.{n}": t for n, t in moe.state_dict().items()}
    for name, parameter in moe.named_parameters():
        slots = optimizer.state[parameter].items()
        full |= {f"optimizer.{name}.{slot}": value for slot, value in slots}
    return {
        n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for n, t in full.items()
    }


def save(folder, layout):
    moe, optimizer = build(layout)
    step(moe, optimizer)
    with Store(folder) as store:
        store.save(1, {"model": moe, "optimizer": optimizer})
    return whole(moe, optimizer)


def load(source, layout, wanted, target=None):
    """Load into other weights; what differs from `wanted`; the step after; saved again at `target`."""
    moe, optimizer = build(layout, seed=1)
    step(moe, optimizer)
    state = {"model": moe, "optimizer": optimizer}
    with Store(source, read_only=True) as store:
        assert store.load(state) == 1
    found = whole(moe, optimizer)
    assert found.keys() == wanted.keys()
    differs = [n for n in wanted if not torch.equal(found[n], wanted[n])]
    if target is not None:
        with Store(target) as store:
            store.save(1, state)
    step(moe, optimizer, seed=6)
    return differs, whole(moe, optimizer)


@pytest.mark.slow
def test_F31_a_checkpoint_of_ep_4_loads_on_other_ranks_and_back(tmp_path):
    wanted = run_on_ranks(4, save, str(tmp_path / "ep 4"), "ep 4")[0]
    experts = {n: t for n, t in wanted.items() if "experts." in n and t.dim() == 3}
    assert len(experts) == 9  # three matrices and two moments of each
    assert all(t.size(0) == 8 for t in experts.values())
    after = []
    for layout in ("ep 1", "ep 2", "efsdp 2 x ep 2", "ep 4 in two nodes", "alone"):
        efsdp, ep, _ = LAYOUTS[layout]
        source, target = str(tmp_path / "ep 4"), str(tmp_path / layout)
        results = run_on_ranks(efsdp * ep, load, source, layout, wanted, target)
        assert [differs for differs, _ in results] == [[]] * (efsdp * ep), layout
        after += [state for _, state in results]
        # ... and back: what the other layout saved is the same again on ep 4
        results = run_on_ranks(4, load, target, "ep 4", wanted)
        assert [differs for differs, _ in results] == [[]] * 4, layout
        after += [state for _, state in results]
    # and they are the same model: the next step ends in the same weights
    for state in after:
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, after[0][name], rtol=1e-5, atol=1e-6, msg=name)

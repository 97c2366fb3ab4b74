"""A layer whose experts lie on several ranks is the layer of one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from forge_moe import (
    LocalDispatch,
    MoE,
    MoEConfig,
    expert_parallelize,
    recompute_contexts,
    update_expert_bias,
)
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.distributed

DIM = 16
MARGIN = 1e-5  # the last chosen logit above the first left out: rounding cannot change a route

# options of expert_parallelize
KINDS = {
    "all_to_all": {},
    "hierarchical": {"dispatcher": "hierarchical", "ranks_per_node": 2},
    "chunks": {"chunks": 2},
    "hierarchical chunks": {"dispatcher": "hierarchical", "ranks_per_node": 2, "chunks": 2},
}


def build(**options):
    torch.manual_seed(3)
    moe = MoE(MoEConfig(**{"dim": DIM, "hidden_dim": 24, "num_experts": 8, "top_k": 3} | options))
    with torch.no_grad():
        for parameter in moe.parameters():  # of a size that makes routes and outputs differ
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return moe.to(device())


def batch(tokens, seed=0):
    """x and the gradient of y, of all ranks together."""
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, sum(tokens), DIM, generator=g).to(device()))


def one_process(moe, x, grad, parts=None):
    """y and every gradient of the plain layer on all tokens; asserts the margin of its routes.

    `parts`: the layer sees the tokens of each rank apart, for what depends on the batch.
    """
    assert type(moe.dispatcher) is LocalDispatch
    k = moe.config.top_k
    if len(x) and k < moe.config.num_experts:
        top = moe.router.route(x).logits.topk(k + 1, dim=1).values
        gaps = top[:, k - 1] - top[:, k]
        assert ((gaps > MARGIN) | (gaps == 0)).all()  # a tie is one on every rank
    x = x.clone().requires_grad_()
    y = torch.cat([moe(part) for part in x.split(parts or [len(x)])])
    (y * grad).sum().backward()
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in moe.named_parameters()}


def this_rank(moe, x, grad, tokens):
    """The same of the layer over ranks: this rank's tokens, whole gradients."""
    rank = dist.get_rank()
    x = x.split(tokens)[rank].clone().requires_grad_()
    y = moe(x)
    (y * grad.split(tokens)[rank]).sum().backward()
    found = {"y": y.detach(), "x": x.grad}
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None, name
        if isinstance(parameter.grad, DTensor):
            found[name] = parameter.grad.full_tensor()
        else:  # a plain parameter: partial over ranks, as of any dense one
            dist.all_reduce(parameter.grad)
            found[name] = parameter.grad
    return found


def error(a, b):
    if a.shape != b.shape:
        return float("inf")
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item() if b.numel() else 0.0


def errors(tokens, wanted, found):
    rank = dist.get_rank()
    mine = {k: v.split(tokens)[rank] if k in ("y", "x") else v for k, v in wanted.items()}
    return {name: error(found[name], mine[name]) for name in mine}


def compare(kind, tokens, options, apart=False, dtype=torch.float32, ties=False):
    moe = build(**options).to(dtype)
    x, grad = (t.to(dtype) for t in batch(tokens))
    if ties:  # equal columns of the router: pairs of experts that no token can tell apart
        with torch.no_grad():
            moe.router.weight[1::2] = moe.router.weight[::2]
    wanted = one_process(copy.deepcopy(moe), x, grad, tokens if apart else None)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("ep",))
    moe = expert_parallelize(moe, mesh["ep"], **KINDS[kind])
    return errors(tokens, wanted, this_rank(moe, x, grad, tokens))


SHARED = {"num_shared_experts": 2, "shared_gate": True}
CASES = {
    "two ranks": ("all_to_all", [7, 9], {}),
    "four ranks": ("all_to_all", [7, 9, 4, 6], {}),
    "2 x 2": ("hierarchical", [7, 9, 4, 6], {}),
    "256 experts": ("all_to_all", [20, 9, 14, 6], {"num_experts": 256, "top_k": 8}),
    "256 experts, 2 x 2": ("hierarchical", [20, 9, 14, 6], {"num_experts": 256, "top_k": 8}),
    "a rank without tokens": ("all_to_all", [7, 0, 4, 6], {}),
    "2 x 2, a node without tokens": ("hierarchical", [0, 0, 4, 6], {}),
    "shared experts, chunks": ("chunks", [7, 9, 4, 6], SHARED),
    "2 x 2, shared experts, chunks": ("hierarchical chunks", [7, 9, 0, 6], SHARED),
    "gelu with biases": ("all_to_all", [7, 9], {"activation": "gelu", "bias": True}),
    "gpt-oss, chunks": (
        "chunks",
        [7, 9],
        {"activation": "clamped_swiglu", "swiglu_limit": 0.5, "bias": True, "router_bias": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_equal_one_process(case):
    kind, tokens, options = CASES[case]
    for found in run_on_ranks(len(tokens), compare, kind, tokens, options):
        routers = {n: e for n, e in found.items() if n.startswith("router")}
        experts = {n: e for n, e in found.items() if n.startswith("experts")}
        assert routers
        assert experts
        # compared separately: a router's gradient is the one that a wrong combine spoils unseen
        assert max(routers.values()) < 1e-5, routers
        assert max(experts.values()) < 1e-5, experts
        assert found["y"] < 1e-5
        assert found["x"] < 1e-5
        assert max(found.values()) < 1e-5, found


def compare_in_groups_of_their_own(*case):
    if (
        dist.get_rank() == 1
    ):  # torch names a group of some ranks by how many groups each of them is in
        dist.new_group([1], use_local_synchronization=True)
    return compare(*case)


@pytest.mark.lane("test")
def test_ranks_that_are_in_unlike_groups():
    for found in run_on_ranks(
        2, compare_in_groups_of_their_own, "hierarchical", [7, 9], {}, timeout=30
    ):
        assert max(found.values()) < 1e-5, found


ROUTERS = {
    "weights of all experts": ({"normalize": "before_top_k"}, False),
    "sigmoid, groups": (
        {
            "router": "sigmoid_topk",
            "num_groups": 4,
            "top_groups": 2,
            "top_k": 3,
            "route_scale": 2.5,
        },
        False,
    ),
    "uniform": ({"router": "uniform"}, True),
    "expert choice": ({"router": "expert_choice"}, True),
    "capacity, by position": ({"capacity_factor": 0.6}, True),
    "capacity, by probability": ({"capacity_factor": 0.6, "drop_policy": "probability"}, True),
    "padded batch": ({"backend": "batched"}, False),
    "grouped kernel": ({"backend": "grouped_mm"}, False),
    "loop": ({"backend": "loop"}, False),
}


@pytest.mark.parametrize("kind", ["all_to_all", "hierarchical chunks"])
@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_and_backend_equals_one_process(kind, router):
    """What looks at the whole batch (`apart`) sees the tokens of its rank."""
    options, apart = ROUTERS[router]
    tokens = [40, 12, 0, 17]
    for found in run_on_ranks(4, compare, kind, tokens, options, apart):
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("kind", ["all_to_all", "hierarchical"])
def test_exact_ties_and_500_tokens(kind):
    for found in run_on_ranks(
        4, compare, kind, [500, 131, 1, 64], {"top_k": 2}, False, torch.float64, True
    ):
        assert max(found.values()) < 1e-12, found  # nothing on the way is narrower than fp64


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_differs_by_roundings_of_the_transfer(kind):
    for found in run_on_ranks(4, compare, kind, [40, 12, 0, 17], SHARED, False, torch.bfloat16):
        # sums of at most 4 parts, each rounded to 2^-8 once or twice, then y itself; gradients alike
        assert max(found.values()) < 2e-2, found
        assert found["y"] < 1e-2


def recomputed(kind):
    """Checkpointed layers over ranks with FSDP: errors, and counts of the recomputation."""
    from torch.utils.checkpoint import checkpoint

    tokens = [9, 5, 0, 6]
    moe = build(**SHARED)
    x, grad = batch(tokens)
    wanted = one_process(copy.deepcopy(moe), x, grad)
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("efsdp", "ep"))
    expert_parallelize(moe, mesh["ep"], **KINDS[kind])
    fully_shard(moe.experts, mesh=mesh["efsdp"])
    moe.experts.set_gradient_divide_factor(1.0)
    moe.experts.set_force_sum_reduction_for_comms(True)
    forward = moe.forward
    moe.forward = lambda x: checkpoint(
        forward, x, use_reentrant=False, context_fn=recompute_contexts
    )
    found = errors(tokens, wanted, this_rank(moe, x, grad, tokens))
    return found, int(moe.statistics()["counts"].sum()), 3 * tokens[dist.get_rank()]


@pytest.mark.parametrize("kind", ["all_to_all", "chunks"])
def test_recomputation_over_ranks_with_fsdp_counts_once(kind):
    for found, counted, chosen in run_on_ranks(4, recomputed, kind):
        assert max(found.values()) < 1e-5, found
        assert counted == chosen


def with_fsdp(kind, tokens):
    """experts over ep 2 and efsdp 2, everything else over all four ranks."""
    moe = build(**SHARED)
    x, grad = batch(tokens)
    wanted = one_process(copy.deepcopy(moe), x, grad)
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("efsdp", "ep"))
    dense = init_device_mesh(device().type, (4,), mesh_dim_names=("dp_shard",))
    expert_parallelize(moe, mesh["ep"], **KINDS[kind])
    for module, axis in ((moe.experts, mesh["efsdp"]), (moe, dense)):
        fully_shard(module, mesh=axis)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return errors(tokens, wanted, this_rank(moe, x, grad, tokens))


@pytest.mark.parametrize("kind", ["all_to_all", "chunks"])
def test_F03_expert_gradients_under_ep_and_fsdp_are_those_of_one_process(kind):
    for found in run_on_ranks(4, with_fsdp, kind, [7, 9, 0, 6]):
        assert max(found.values()) < 1e-5, found


BALANCED = {"router": "sigmoid_topk", "bias_update_rate": 0.01, "top_k": 2}


def trained(kind, tokens, over_ranks=True):
    """Twenty steps of SGD and of the bias: weights and bias, of one process and of the ranks."""
    moe = build(**BALANCED)
    alone = copy.deepcopy(moe)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("ep",))
    expert_parallelize(moe, mesh["ep"], **KINDS[kind])
    for step in range(20):
        x, grad = batch(tokens, seed=step)
        one_process(alone, x, grad)
        this_rank(moe, x, grad, tokens)
        update_expert_bias(alone, step, 20, groups=())
        update_expert_bias(moe, step, 20, groups=mesh["ep"].get_group() if over_ranks else ())
        for layer in (alone, moe):
            for parameter in layer.parameters():
                with torch.no_grad():
                    parameter.sub_(1e-3 * parameter.grad)
                parameter.grad = None
    states = []
    for layer in (alone, moe):
        state = layer.state_dict()
        states.append(
            {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
        )
    return states


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all_to_all", "hierarchical"])
def test_F20_the_bias_after_20_steps_is_that_of_one_process(kind):
    for alone, ranks in run_on_ranks(4, trained, kind, [9, 0, 4, 6]):
        assert torch.equal(alone["router.expert_bias"], ranks["router.expert_bias"])
        assert len(alone["router.expert_bias"].unique()) > 2  # it moved, in many ways
        for name in alone:
            assert error(ranks[name], alone[name]) < 1e-5, name


def within_capacity():
    moe = build(capacity_factor=0.5)
    mesh = init_device_mesh(device().type, (2,), mesh_dim_names=("ep",))
    expert_parallelize(moe, mesh["ep"])
    seen, sent, exchange = [], [], dist.all_to_all_single
    moe.experts.register_forward_pre_hook(lambda _, args: seen.append(args[0].size(0)))

    def count(out, rows, *args, **kwargs):
        sent.append(rows.size(0))
        return exchange(out, rows, *args, **kwargs)

    dist.all_to_all_single = count
    try:
        moe(batch([30])[0])
    finally:
        dist.all_to_all_single = exchange
    statistics = moe.statistics()
    kept = int(statistics["counts"].sum() - statistics["dropped"])
    return sum(seen), kept, sent[1]


def test_F25_dropped_rows_are_neither_computed_nor_sent():
    results = run_on_ranks(2, within_capacity)
    kept = sum(k for _, k, _ in results)
    assert sum(rows for rows, _, _ in results) == kept
    assert kept < 2 * 30 * 3 * 0.6
    assert all(0 < sent <= k for _, k, sent in results)


def compiled():
    """The layer over ranks, as it is and under torch.compile."""
    tokens = [9, 5]
    results = []
    for wrap in (lambda moe: moe, lambda moe: torch.compile(moe, backend="eager")):
        moe = build(**SHARED)
        mesh = init_device_mesh(device().type, (2,), mesh_dim_names=("ep",))
        expert_parallelize(moe, mesh["ep"], chunks=2)
        x = batch(tokens)[0].split(tokens)[dist.get_rank()].clone().requires_grad_()
        y = wrap(moe)(x)
        y.sum().backward()
        results.append([y, x.grad, *(p.grad for p in moe.parameters())])
    locals_ = [[t.to_local() if isinstance(t, DTensor) else t for t in r] for r in results]
    return all(torch.equal(a, b) for a, b in zip(*locals_))


@pytest.mark.slow
def test_torch_compile_leaves_the_exchange_eager():
    assert run_on_ranks(2, compiled) == [True] * 2


def rows_computed():
    tokens = [5, 8, 2, 6]
    moe = build()
    mesh = init_device_mesh(device().type, (4,), mesh_dim_names=("ep",))
    expert_parallelize(moe, mesh["ep"])
    seen = []
    moe.experts.register_forward_pre_hook(lambda _, args: seen.append(args[0].size(0)))
    moe(batch(tokens)[0].split(tokens)[dist.get_rank()])
    return sum(seen), 3 * sum(tokens)


def test_F02_ranks_bring_their_own_tokens_and_share_the_work():
    results = run_on_ranks(4, rows_computed)
    assert sum(rows for rows, _ in results) == results[0][1]  # each token once
    assert all(0 < rows < results[0][1] for rows, _ in results)


def idle(efsdp):
    """One token in the whole job: most ranks have no tokens, most experts no rows."""
    moe = build(top_k=1, normalize="before_top_k")
    mesh = init_device_mesh(device().type, (4 // efsdp, efsdp), mesh_dim_names=("ep", "efsdp"))
    expert_parallelize(moe, mesh["ep"])
    if efsdp > 1:
        fully_shard(moe.experts, mesh=mesh["efsdp"])
    x = torch.randn(int(dist.get_rank() == 0), DIM, device=device(), requires_grad=True)
    for _ in range(2):  # the second step hangs if the first left a rank behind
        moe(x).sum().backward()
    return all(p.grad is not None for p in moe.parameters())


@pytest.mark.parametrize("efsdp", [1, 2])
def test_F30_ranks_without_tokens_and_experts_without_rows_take_part(efsdp):
    assert run_on_ranks(4, idle, efsdp) == [True] * 4


def identity():
    """What each rank holds of the experts after the split, and of a layer on the meta device."""
    moe = build()
    whole = {n: p.detach().clone() for n, p in moe.experts.named_parameters()}
    mesh = init_device_mesh(device().type, (4,), mesh_dim_names=("ep",))
    expert_parallelize(torch.nn.Sequential(moe), mesh["ep"])
    rank = dist.get_rank()
    own = all(
        torch.equal(p.to_local(), whole[n][2 * rank : 2 * rank + 2])
        and p.shape == whole[n].shape
        and p.to_local().untyped_storage().nbytes() * 4 == whole[n].untyped_storage().nbytes()
        for n, p in moe.experts.named_parameters()
    )
    with torch.device("meta"):
        empty = expert_parallelize(build_empty(), mesh["ep"])
    shapes = {
        (type(p).__name__, p.is_meta, p.to_local().size(0)) for p in empty.experts.parameters()
    }
    return own, shapes, type(moe.router.weight).__name__


def build_empty():
    return MoE(MoEConfig(dim=DIM, hidden_dim=24, num_experts=8, top_k=3))


@pytest.mark.slow
def test_experts_keep_their_global_index():
    for own, shapes, router in run_on_ranks(4, identity):
        assert own
        assert shapes == {("DTensor", True, 2)}
        assert router == "Parameter"


def refusals():
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("efsdp", "ep"))
    ep4 = init_device_mesh(device().type, (4,), mesh_dim_names=("ep",))
    sharded = expert_parallelize(build(), mesh["ep"])
    wrapped = build()
    fully_shard(wrapped.experts, mesh=mesh["efsdp"])
    with rejects("model", ..., "missing"):
        expert_parallelize(torch.nn.Linear(2, 2), mesh["ep"])
    with rejects("mesh", ("efsdp", "ep"), "dims"):
        expert_parallelize(build(), mesh)
    with rejects("num_experts", 6, "divides", where="0"):
        expert_parallelize(torch.nn.Sequential(build(num_experts=6)), ep4)
    with rejects("experts", ..., "sharded", where="MoE"):
        expert_parallelize(sharded, mesh["ep"])
    with rejects("experts", ..., "wrapped", where="MoE"):
        expert_parallelize(wrapped, mesh["ep"])
    with rejects("dispatcher", "ring", "unknown"):
        expert_parallelize(build(), mesh["ep"], dispatcher="ring")
    with rejects("ranks_per_node", 3, "divides"):
        expert_parallelize(build(), ep4, dispatcher="hierarchical", ranks_per_node=3)


@pytest.mark.lane("test")
def test_wrong_arguments_are_rejected_with_value_rule_and_fix():
    run_on_ranks(4, refusals)

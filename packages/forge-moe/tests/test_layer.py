"""The layer as a module of a model: shapes, dtypes, shared experts, initial weights, roles, modes, compile."""

import copy
from types import SimpleNamespace

import pytest
import torch

from forge_moe import LocalDispatch, MoE, MoEConfig, aux_losses, update_expert_bias
from forge_moe.experts import Experts
from forge_moe.layer import SharedExperts
from forge_moe.router import SOFTMAX_TOPK, Router
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def layer(**settings) -> MoE:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(**{"dim": 8, "hidden_dim": 16, "num_experts": 4, **settings}))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return moe


def test_shapes_and_dtypes_come_back() -> None:
    moe = layer()
    for shape in ((5, 8), (2, 3, 8), (0, 8), (2, 0, 8)):
        assert moe(torch.randn(shape)).shape == shape
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(moe(x).view(6, 8), moe(x.view(6, 8)))
    torch.testing.assert_close(moe(x.transpose(0, 1)).transpose(0, 1), moe(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert moe(x).dtype == torch.float32
    assert moe.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_F24_three_shared_experts_are_three() -> None:
    moe = layer(num_shared_experts=3)
    assert moe.shared.up_proj.weight.shape == (48, 8)
    x, total = torch.randn(5, 8), 0.0
    for s in range(3):
        part = slice(16 * s, 16 * s + 16)
        gate, up = (p.weight[part] for p in (moe.shared.gate_proj, moe.shared.up_proj))
        total += (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ moe.shared.down_proj.weight[
            :, part
        ].T
    torch.testing.assert_close(moe.shared(x), total)


def test_F26_residual_projections_of_experts_get_the_residual_std() -> None:
    moe = layer(num_shared_experts=1, shared_gate=True, bias=True, bias_update_rate=0.1)
    table = moe.init_table(0.02, 0.005)
    assert {name for name, _ in moe.named_parameters()} | {"router.expert_bias"} == set(table)
    small = [name for name, (kind, value) in table.items() if value == 0.005]
    assert sorted(small) == ["experts.down_proj", "shared.down_proj.weight"]
    zero = {name for name, (kind, value) in table.items() if kind == "constant"}
    assert zero == {n for n in table if "bias" in n}
    lagged = layer(aux_scope="global_batch_lagged").init_table(0.02, 0.005)
    assert lagged["lagged_counts"] == ("constant", 0.0)


def test_every_parameter_has_one_role() -> None:
    from fnmatch import fnmatch

    moe = layer(num_shared_experts=1, shared_gate=True, bias=True)
    roles = moe.parallel_roles()
    for name, _ in moe.named_parameters():
        assert sum(fnmatch(name, pattern) for pattern in roles) == 1, name


def test_flops_are_those_of_its_matmuls() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    moe = layer(num_shared_experts=2, shared_gate=True, backend="loop")
    with FlopCounterMode(display=False) as counter:
        moe(torch.randn(7, 8))
    assert counter.get_total_flops() == 7 * moe.flops_per_token(1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"router": "sigmoid_topk", "route_scale": 2.5},
        {"capacity_factor": 4.0},
        {"num_shared_experts": 2, "shared_gate": True},
    ],
)
def test_F27_training_and_evaluation_are_one_function(settings: dict) -> None:
    moe, x = layer(aux="attach", aux_loss_weight=1.0, **settings), torch.randn(9, 8)
    assert torch.equal(moe(x), moe.eval()(x))


def test_F30_no_token_at_all_keeps_every_parameter_in_the_graph() -> None:
    moe = layer(num_shared_experts=1, bias=True, aux="attach", aux_loss_weight=1.0)
    x = torch.randn(0, 8, requires_grad=True)
    moe(x).sum().backward()
    assert x.grad is not None
    assert all((p.grad == 0).all() for p in moe.parameters())


def test_the_same_bits_every_time_whatever_the_other_sequences() -> None:
    """A token's rows are its own: in fp64, where products do not depend on the batch's shape."""
    moe, x = layer().double(), torch.randn(20, 8, dtype=torch.float64)
    assert torch.equal(moe(x), moe(x))
    torch.testing.assert_close(moe(x)[:5], moe(x[:5]), rtol=1e-14, atol=1e-14)


def test_local_dispatch_brings_back_what_it_took() -> None:
    ids = torch.tensor([[2, 0], [4, 4], [0, 4], [2, 3]])  # 4 is dropped
    weights = torch.where(ids < 4, torch.rand(4, 2), 0.0).requires_grad_()
    x = torch.randn(4, 8, requires_grad=True)
    local = LocalDispatch(4)
    for num_rows in (None, 5):
        sent = local.dispatch(x, weights, ids, num_rows=num_rows)
        assert sent.counts.tolist() == [2, 0, 2, 1]
        assert torch.equal(sent.rows[:5], x[[0, 2, 0, 3, 3]])
        assert sent.rows.size(0) == (num_rows or 8)
        y = local.combine(sent.rows, sent.meta)
        total = weights.sum(1, keepdim=True)
        torch.testing.assert_close(y, x * total)
        grad_x, by_slot = torch.autograd.grad(y.square().sum(), [x, weights])
        wanted = torch.autograd.grad((x * total).square().sum(), [x, weights])
        torch.testing.assert_close(grad_x, wanted[0])
        torch.testing.assert_close(by_slot[ids < 4], wanted[1][ids < 4])


def test_expert_choice_computes_the_rows_that_were_chosen() -> None:
    moe, rows = layer(router="expert_choice", num_experts=8), []
    moe.experts.register_forward_pre_hook(lambda _, given: rows.append(given[0].size(0)))
    valid = torch.arange(20) < 3  # fewer tokens than an expert's share of 5
    y = moe(torch.randn(20, 8), SimpleNamespace(valid=valid))
    y.sum().backward()
    assert rows == [40]
    assert (y[3:] == 0).all()
    assert moe.statistics()["counts"].tolist() == [1] * 8  # ceil(3 valid tokens x 2 / 8)
    alone = layer(router="expert_choice", num_experts=8)
    alone.load_state_dict(moe.state_dict())
    x = torch.randn(8, 8)
    padded = torch.cat([x, torch.full((24, 8), float("nan"))])
    valid = torch.arange(32) < 8
    torch.testing.assert_close(moe(padded, SimpleNamespace(valid=valid))[:8], alone(x))


def test_a_rule_that_leaves_tokens_out_computes_nothing_for_them() -> None:
    """Rows that nobody filled must not reach output or gradients, whatever lay in their memory."""
    for backend in ("loop", "batched", "grouped_mm"):
        moe = layer(backend=backend)

        def half(scores, config, valid):
            ids = SOFTMAX_TOPK.choose(scores, config, valid)
            return ids.masked_fill(torch.arange(len(ids)).unsqueeze(1) % 2 == 0, 4)

        moe.router.rule = SOFTMAX_TOPK._replace(choose=half, routes_all_slots=False)
        dirt = [torch.full((64, 8), float("nan")) for _ in range(64)]
        del dirt
        x = torch.randn(32, 8, requires_grad=True)
        y = moe(x)
        y.sum().backward()
        assert (y[::2] == 0).all()
        assert x.grad.isfinite().all()
        assert (x.grad[::2] == 0).all()


def test_a_forward_under_inference_mode_leaves_a_layer_that_trains() -> None:
    moe = layer(bias_update_rate=0.1)
    for mode in (moe.eval, moe.train):
        mode()
        with torch.inference_mode():
            moe(torch.randn(4, 8))
    moe.train()
    moe(torch.randn(4, 8)).sum().backward()
    assert moe.statistics()["tokens"] == 12
    update_expert_bias(moe, 0, 1)


def test_losses_of_several_forwards_add_up_and_those_of_none_are_not_kept() -> None:
    moe = layer(aux_loss_weight=1.0)
    x = torch.randn(2, 4, 8)
    moe(x)
    once = aux_losses(moe).total
    moe(x), moe(x)
    torch.testing.assert_close(aux_losses(moe).total, 2 * once)
    moe(x)
    moe.eval()(x)
    moe.train()
    with torch.no_grad():
        moe(x)
    with rejects("model", ..., "no_losses"):
        aux_losses(moe)
    sequences = layer(sequence_loss_weight=1.0)
    with rejects("x", (8, 8), "dims"):
        sequences(torch.randn(8, 8))


def test_a_dispatcher_may_run_the_complete_layer() -> None:
    moe, x = layer(num_shared_experts=1), torch.randn(6, 8)
    wanted = moe(x)
    local = moe.dispatcher

    def run(x, weights, ids, experts, meanwhile):
        sent = local.dispatch(x, weights, ids)
        shared = meanwhile()
        return local.combine(experts(sent.rows, sent.counts), sent.meta), shared

    moe.dispatcher = SimpleNamespace(run=run)
    assert torch.equal(moe(x), wanted)


def test_statistics_sum_until_reset() -> None:
    moe, x = layer(bias_update_rate=0.1), torch.randn(6, 8)
    assert moe.statistics()["counts"].tolist() == [0] * 4
    routed = moe.router.route(x)
    moe(x)
    moe.eval()(x)
    found = moe.statistics(reset=True)
    assert set(found) == {"counts", "tokens", "dropped", "entropy", "bias"}
    assert torch.equal(found["counts"], 2 * torch.bincount(routed.ids.flatten(), minlength=4))
    assert (found["tokens"], found["dropped"]) == (12, 0)
    p = routed.probabilities
    torch.testing.assert_close(found["entropy"], -(p * p.log()).sum(-1).mean())
    assert moe.statistics()["tokens"] == 0
    assert moe.counters.step_counts.sum() == 12  # of training alone, and not reset


@pytest.mark.parametrize("training", [True, False])
def test_statistics_leave_pads_out(training: bool) -> None:
    moe, x = layer().train(training), torch.randn(6, 8)
    valid = torch.tensor([True, False, True, True, False, True])
    moe(x, SimpleNamespace(valid=valid))
    found, routed = moe.statistics(), moe.router.route(x[valid])
    assert torch.equal(found["counts"], torch.bincount(routed.ids.flatten(), minlength=4))
    assert found["tokens"] == 4
    p = routed.probabilities
    torch.testing.assert_close(found["entropy"], -(p * p.log()).sum(-1).mean())


def test_copies_and_state() -> None:
    moe = layer(bias_update_rate=0.1, aux_scope="global_batch_lagged", aux_loss_weight=1.0)
    moe(torch.randn(4, 8))
    assert copy.deepcopy(moe).pending_losses is None  # the losses of a forward hold a graph
    assert moe.pending_losses is not None
    twin = copy.deepcopy(layer(bias_update_rate=0.1, aux_scope="global_batch_lagged"))
    moe.router.expert_bias.normal_()
    twin.load_state_dict(moe.state_dict())
    x = torch.randn(4, 8)
    assert torch.equal(twin(x), moe(x))
    assert set(moe.state_dict()) - {n for n, _ in moe.named_parameters()} == {
        "router.expert_bias",
        "lagged_counts",
    }


@pytest.mark.parametrize(
    ("settings", "key", "code"),
    [
        ({"hidden_dim": 0}, "hidden_dim", "range"),
        ({"shared_gate": True}, "shared_gate", "needs_experts"),
        ({"capacity_factor": 0.0}, "capacity_factor", "range"),
        ({"aux": "none", "z_loss_weight": 0.1}, "aux", "weights"),
        ({"aux_loss_weight": -1.0}, "aux_loss_weight", "range"),
        ({"backend": "magic"}, "backend", "unknown"),
        ({"router": "softmax"}, "router", "unknown"),
    ],
)
def test_invalid_arguments_are_rejected(settings: dict, key: str, code: str) -> None:
    with rejects(key, settings[key], code):
        MoE(MoEConfig(**{"dim": 8, "hidden_dim": 8, "num_experts": 4, **settings}))


def test_all_problems_are_listed_at_once() -> None:
    with rejects("dim", 0, "range") as caught:
        MoEConfig(0, 8, 4, top_k=9, aux="now")
    assert {p.key for p in caught.value.problems} == {"dim", "top_k", "aux"}


def test_a_context_that_does_not_fit_is_rejected() -> None:
    with rejects("valid", (3,), "length"):
        layer()(torch.randn(2, 3, 8), SimpleNamespace(valid=torch.ones(3, dtype=torch.bool)))


@pytest.mark.slow
def test_compiled_bf16_breaks_the_graph_once_and_agrees() -> None:
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    moe = layer(aux="attach", aux_loss_weight=0.1, bias_update_rate=0.1).bfloat16()
    x = torch.randn(2, 12, 8).bfloat16()
    wanted = moe(x)
    counts = moe.counters.step_counts.clone()
    compiled = torch.compile(moe, backend=count)
    assert torch.equal(compiled(x), wanted)
    assert torch.equal(moe.counters.step_counts, 2 * counts)
    assert len(graphs) <= 3  # before the question whether this is a backward pass, and after it


@pytest.mark.parametrize("part", ["", "router", "experts", "shared"])
def test_F157_reset_parameters_after_to_empty_is_the_constructor(part: str) -> None:
    settings = {"bias": True, "router_bias": True, "num_shared_experts": 1, "shared_gate": True}
    scope = {"aux_loss_weight": 0.1, "aux_scope": "global_batch_lagged", "expert_bias": True}
    config = MoEConfig(8, 16, 4, **settings, **scope)
    with torch.device("meta"):
        moe = MoE(config)
    module = moe.to_empty(device="cpu").get_submodule(part)
    for tensor in module.state_dict().values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    torch.manual_seed(3)
    wanted = {"": MoE, "router": lambda c: Router(c.router_config), "experts": Experts, "shared": SharedExperts}[part](config)  # fmt: skip
    torch.manual_seed(3)
    module.reset_parameters()
    found = module.state_dict()
    assert found.keys() == wanted.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.state_dict().items())


def test_F153_a_shared_expert_that_counts_its_own_operations_is_asked() -> None:
    moe = layer(num_shared_experts=1, shared_gate=True)
    before = moe.flops_per_token(1)
    assert before == 2 * 8 * (4 + 3 * 2 * 16 + 3 * 16 + 1)
    moe.shared.up_proj.flops_per_token = lambda seq_len: (
        2.0 * 8 * 16 + 1000.0
    )  # as one with an adapter
    assert moe.flops_per_token(1) == before + 1000.0


def test_a_layer_of_keywords_is_that_of_its_config() -> None:
    config = MoEConfig(8, 16, 4, top_k=3, bias=True, num_shared_experts=1)
    made = []
    for build in (
        lambda: MoE(config),
        lambda: MoE.from_config(config),
        lambda: MoE(8, 16, 4, top_k=3, bias=True, num_shared_experts=1),
    ):
        torch.manual_seed(0)
        made.append(build())
    state, *others = (moe.state_dict() for moe in made)
    for moe, other in zip(made[1:], others):
        assert moe.config == config
        assert all(torch.equal(state[name], other[name]) for name in state)
    assert all(str(size) in repr(made[1]) for size in (8, 16, 4, 3))

    half = MoE(
        dim=8, hidden_dim=16, num_experts=4, expert_bias=True, device="meta", dtype=torch.bfloat16
    )
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert all(p.is_meta for p in half.parameters())
    assert half.router.expert_bias.dtype == torch.float32
    for part in (Router(dim=8, num_experts=4), Experts(dim=8, hidden_dim=16, num_experts=4)):
        assert part.config.dim == 8
        assert "4" in part.extra_repr()
    with rejects("top_k", 9, "above_experts", where="moe: "):
        MoE(dim=8, hidden_dim=16, num_experts=4, top_k=9)
    with pytest.raises(TypeError, match="num_expert"):
        MoE(dim=8, hidden_dim=16, num_expert=4)


@pytest.mark.parametrize("scope", ["micro_batch", "sequence"])
def test_returned_losses_are_those_that_aux_losses_takes(scope: str) -> None:
    weights = {"aux_loss_weight": 0.1, "z_loss_weight": 0.01, "aux_scope": scope}
    returns, holds = layer(**weights), layer(**weights)
    x = torch.randn(2, 12, 8)
    y, aux = returns(x, return_aux=True)
    assert torch.equal(y, holds(x))
    assert torch.equal(aux.total, aux_losses(holds).total * 1)
    with rejects("model", ..., "no_losses"):
        aux_losses(returns)  # not given out twice

    (y.square().mean() + aux.total).backward()
    (holds(x).square().mean() + aux_losses(holds).total).backward()
    assert torch.equal(returns.router.weight.grad, holds.router.weight.grad)

    _, aux = returns.eval()(x, return_aux=True)
    assert [float(loss) for loss in aux] == [0.0] * 4
    for mode in ("attach", "none"):
        own = {} if mode == "none" else weights
        with rejects("return_aux", mode, "aux"):
            layer(aux=mode, **own)(x, return_aux=True)

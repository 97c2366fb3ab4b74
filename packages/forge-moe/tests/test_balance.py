"""Router losses against their own definitions, attached losses, the loss-free bias.

Shapes: B rows, S tokens, E experts.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from forge_moe import MoE, MoEConfig, aux_losses, set_aux_scale, update_expert_bias
from forge_moe.load_balancing import moved_bias, rate_at
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

D, E, K = 8, 4, 2


def layer(**settings) -> MoE:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(**{"dim": D, "hidden_dim": 8, "num_experts": E, "top_k": K, **settings}))
    torch.nn.init.normal_(moe.router.weight)
    return moe.to(device())


def switch(logits: torch.Tensor, sigmoid: bool = False) -> torch.Tensor:
    """E sum_e f_e P_e over tokens (T, E), written out (Switch Transformer, equations 4 to 6)."""
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    chosen = scores.topk(K).indices
    total = torch.zeros(())
    for e in range(E):
        f = (chosen == e).sum() / (len(logits) * K)
        p = (scores[:, e] / scores.sum(-1)).mean()
        total = total + E * f * p
    return total


def logits_of(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, moe.router.weight).reshape(-1, E)


@pytest.mark.parametrize("router", ["softmax_topk", "sigmoid_topk"])
def test_micro_batch_scope_and_F23_the_weight_counts_once(router: str) -> None:
    moe = layer(router=router, aux_loss_weight=0.25)
    x = torch.randn(3, 5, D)
    moe(x)
    found = aux_losses(moe)
    wanted = 0.25 * switch(logits_of(moe, x), sigmoid=router == "sigmoid_topk")
    torch.testing.assert_close(found.total, wanted)
    torch.testing.assert_close(found.balance, wanted)
    router_grad = torch.autograd.grad(found.total, moe.router.weight)[0]
    torch.testing.assert_close(router_grad, torch.autograd.grad(wanted, moe.router.weight)[0])
    with rejects("model", ..., "no_losses"):
        aux_losses(moe)


@pytest.mark.parametrize("key", ["aux_loss_weight", "sequence_loss_weight"])
def test_F22_sequence_scope_is_per_sequence(key: str) -> None:
    moe = layer(router="sigmoid_topk", aux_scope="sequence", **{key: 0.5})
    x = torch.randn(3, 5, D)
    moe(x)
    found = aux_losses(moe).total
    each = [switch(logits_of(moe, row), sigmoid=True) for row in x]
    torch.testing.assert_close(found, 0.5 * torch.stack(each).mean())
    assert abs(found - 0.5 * switch(logits_of(moe, x), sigmoid=True)) > 1e-3


def test_in_a_packed_row_a_sequence_is_a_document_and_pads_never_count() -> None:
    """Documents of 3 and 2 tokens, then 4 and a pad; ids may come again in another row."""
    moe = layer(aux_scope="sequence", aux_loss_weight=1.0, z_loss_weight=0.5)
    x = torch.randn(2, 5, D)
    documents = torch.tensor([[7, 7, 7, 9, 9], [9, 9, 9, 9, -1]])
    valid = documents >= 0
    moe(x, SimpleNamespace(valid=valid, document_ids=documents))
    found = aux_losses(moe)
    parts = [(x[0, :3], 3), (x[0, 3:], 2), (x[1, :4], 4)]
    wanted = sum(n * switch(logits_of(moe, part)) for part, n in parts) / 9
    torch.testing.assert_close(found.balance, wanted)
    z = logits_of(moe, x)[valid.flatten()].logsumexp(-1).square().mean()
    torch.testing.assert_close(found.z, 0.5 * z)


def test_pads_change_nothing() -> None:
    """Whatever lies on pads, NaN included."""
    for scope in ("micro_batch", "sequence"):
        moe = layer(aux_loss_weight=1.0, z_loss_weight=0.1, aux_scope=scope)
        x = torch.randn(1, 6, D)
        alone = moe(x)
        terms = aux_losses(moe)
        terms.total.backward()
        wanted = moe.router.weight.grad.clone()
        moe.zero_grad()
        moe.counters.reset()
        padded = torch.cat((x, torch.full((1, 3, D), float("nan"))), dim=1).requires_grad_()
        y = moe(padded, SimpleNamespace(valid=torch.arange(9).unsqueeze(0) < 6))
        found = aux_losses(moe)
        (found.total + 0.0 * y[:, :6].sum()).backward()
        torch.testing.assert_close(y[:, :6], alone)
        assert (y[:, 6:] == 0).all()
        torch.testing.assert_close(found, terms)
        torch.testing.assert_close(moe.router.weight.grad, wanted)
        statistics = moe.statistics()
        assert (statistics["tokens"], statistics["counts"].sum()) == (6, 12)


def test_no_valid_token_at_all_gives_zeros_with_a_graph() -> None:
    moe = layer(aux_loss_weight=1.0, z_loss_weight=1.0, sequence_loss_weight=1.0)
    y = moe(torch.randn(1, 3, D), SimpleNamespace(valid=torch.zeros(1, 3, dtype=torch.bool)))
    (aux_losses(moe).total + y.sum()).backward()
    assert all((p.grad == 0).all() for p in moe.parameters())


def test_global_batch_takes_the_steps_earlier_micro_batches_as_constants() -> None:
    moe = layer(aux_loss_weight=1.0, aux_scope="global_batch")
    first, second = torch.randn(2, 2, 3, D)
    moe(first)
    torch.testing.assert_close(aux_losses(moe).total, switch(logits_of(moe, first)))
    moe(second)
    found = aux_losses(moe).total
    both = logits_of(moe, torch.cat((first, second)))
    shares = torch.bincount(both.softmax(-1).topk(K).indices.flatten(), minlength=E) / (12 * K)
    torch.testing.assert_close(
        found, E * (shares * logits_of(moe, second).softmax(-1).mean(0)).sum()
    )
    update_expert_bias(moe, 0, 10)
    moe(second)
    torch.testing.assert_close(aux_losses(moe).total, switch(logits_of(moe, second)))


def test_lagged_takes_last_steps_counts_and_keeps_them_in_the_state() -> None:
    moe = layer(aux_loss_weight=1.0, aux_scope="global_batch_lagged")
    x = torch.randn(2, 3, D)
    moe(x)
    first = aux_losses(moe).total
    torch.testing.assert_close(first, torch.tensor(1.0))  # even shares: no pressure yet
    counts = moe.statistics()["counts"]
    update_expert_bias(moe, 0, 10)
    assert torch.equal(moe.state_dict()["lagged_counts"], counts)
    moe(x)
    wanted = E * (counts / counts.sum() * logits_of(moe, x).softmax(-1).mean(0)).sum()
    torch.testing.assert_close(aux_losses(moe).total, wanted)


def test_a_masked_step_moves_neither_bias_nor_lagged_counts_and_its_counts_are_dropped() -> None:
    moe = layer(aux_loss_weight=1.0, aux_scope="global_batch_lagged", bias_update_rate=0.1)
    moe(torch.randn(2, 3, D))
    update_expert_bias(moe, 0, 10)
    before = {name: t.clone() for name, t in moe.state_dict().items()}
    assert before["lagged_counts"].any()
    assert before["router.expert_bias"].any()
    moe(torch.randn(2, 5, D))
    update_expert_bias(moe, 1, 10, skip=torch.tensor(1.0))
    assert all(torch.equal(moe.state_dict()[name], t) for name, t in before.items())
    moe(x := torch.randn(2, 7, D))
    chosen = moe.router.route(x.flatten(0, 1)).ids
    update_expert_bias(moe, 2, 10, skip=torch.tensor(0.0))
    wanted = torch.bincount(chosen.flatten(), minlength=E)
    assert torch.equal(moe.state_dict()["lagged_counts"], wanted.to(moe.lagged_counts.dtype))


SETTINGS = {"aux_loss_weight": 0.3, "z_loss_weight": 0.2, "sequence_loss_weight": 0.1}


def test_attach_is_return_without_the_callers_help() -> None:
    x, target = torch.randn(2, 5, D), torch.randn(2, 5, D)
    returned, attached = layer(**SETTINGS), layer(aux="attach", **SETTINGS)
    y = returned(x)
    ((y - target).square().mean() + aux_losses(returned).total).backward()
    z = attached(x)
    assert torch.equal(y, z)
    (z - target).square().mean().backward()
    for a, b in zip(returned.parameters(), attached.parameters()):
        torch.testing.assert_close(a.grad, b.grad)
    with rejects("aux", ..., "attached"):
        aux_losses(attached)


def test_four_micro_batches_of_a_quarter_are_one_batch() -> None:
    """With scope "sequence", whose value is a mean over sequences; loss / 4 goes with a scale of 1/4."""
    x = torch.randn(8, 5, D)
    settings = {"aux": "attach", "aux_scope": "sequence", **SETTINGS}
    whole, parts = layer(**settings), layer(**settings)
    whole(x).square().mean().backward()
    set_aux_scale(parts, torch.tensor(0.25))
    for part in x.split(2):
        (parts(part).square().mean() / 4).backward()
    for a, b in zip(whole.parameters(), parts.parameters()):
        torch.testing.assert_close(a.grad, b.grad)
    with rejects("scale", (1,), "shape"):
        set_aux_scale(parts, torch.ones(1))


@pytest.mark.parametrize("aux", ["attach", "return"])
def test_nothing_is_added_in_eval(aux: str) -> None:
    moe = layer(aux=aux, **SETTINGS).eval()
    plain = layer(aux="none").eval()
    x = torch.randn(4, D)
    for one in (moe, plain):
        one(x).sum().backward()
    torch.testing.assert_close(moe.router.weight.grad, plain.router.weight.grad)
    assert moe.pending_losses is None
    assert moe.counters.step_counts is None


def test_the_bias_moves_by_the_sign_of_the_error() -> None:
    bias = torch.tensor([0.0, 0.5, 0.0, 0.0])
    moved = moved_bias(bias, torch.tensor([1, 2, 5, 0]), 0.1, center=False)
    torch.testing.assert_close(moved, torch.tensor([0.1, 0.5, -0.1, 0.1]))
    centred = moved_bias(bias, torch.tensor([1, 2, 5, 0]), 0.1, center=True)
    torch.testing.assert_close(centred, moved - 0.15)


def test_rates() -> None:
    assert [rate_at(1.0, "constant", s, 100) for s in (0, 99)] == [1.0, 1.0]
    assert rate_at(1.0, "cosine", 0, 100) == 1.0
    assert math.isclose(rate_at(1.0, "cosine", 50, 100), 0.5)
    assert rate_at(1.0, "cosine", 100, 100) == 0.0
    warm = [rate_at(1.0, "linear_warmup", s, 100) for s in (0, 4, 9, 50)]
    assert warm == [0.1, 0.5, 1.0, 1.0]


def test_update_ends_a_step_once_and_skip_masks_it() -> None:
    moe = layer(bias_update_rate=0.1)
    x = torch.randn(20, D)
    moe(x)
    moe(x)
    assert moe.counters.step_counts.sum() == 2 * 20 * K
    update_expert_bias(torch.nn.Sequential(moe), 0, 10, skip=torch.tensor(1.0))
    assert (moe.router.expert_bias == 0).all()
    update_expert_bias(moe, 1, 10)  # the skipped step's counts are gone: nobody is over the mean
    assert (moe.router.expert_bias == 0).all()
    moe(x)
    counts = moe.counters.step_counts.clone()
    update_expert_bias(moe, 2, 10, skip=torch.tensor(0.0))
    torch.testing.assert_close(
        moe.router.expert_bias, 0.1 * torch.sign(counts.float().mean() - counts)
    )


def test_the_bias_evens_a_skewed_load() -> None:
    moe = layer(bias_update_rate=0.05, router="sigmoid_topk")
    moe.router.weight.data[0] += 1.0
    x = torch.randn(400, D) + 0.5
    loads = []
    for step in range(60):
        moe(x)
        loads.append(moe.statistics(reset=True)["counts"])
        update_expert_bias(moe, step, 60)
    first, last = (c.max() / c.float().mean() for c in (loads[0], loads[-1]))
    assert first > 1.5
    assert last < 1.15


def balance_on_ranks(scope: str, rows: list[int]) -> dict:
    """Each rank runs its own rows; sums over ranks of value and gradient times the token share."""
    rank = dist.get_rank()
    moe = layer(aux_loss_weight=1.0, aux_scope=scope, bias_update_rate=0.1)
    moe.data_group = dist.group.WORLD
    begin = sum(rows[:rank])
    x = all_rows(sum(rows))[begin : begin + rows[rank]]
    moe(x)
    total = aux_losses(moe).total * rows[rank] / sum(rows)
    total.backward()
    value = total.detach()
    for tensor in (value, moe.router.weight.grad):
        dist.all_reduce(tensor)
    update_expert_bias(moe, 0, 10, groups=dist.group.WORLD)
    with rejects("groups", None, "missing"):
        update_expert_bias(moe, 1, 10)
    return {
        "value": value.item(),
        "router_grad": moe.router.weight.grad.tolist(),
        "bias": moe.router.expert_bias.tolist(),
    }


def all_rows(num: int) -> torch.Tensor:
    return torch.randn(num, D, generator=torch.Generator().manual_seed(5)).to(device())


@pytest.mark.distributed
def test_F20_global_batch_and_bias_see_all_ranks() -> None:
    """Two ranks of 9 and 3 tokens are one process of 12, in loss, gradient and bias."""
    found = run_on_ranks(2, balance_on_ranks, "global_batch", [9, 3])
    moe = layer(bias_update_rate=0.1)
    x = all_rows(12)
    wanted = switch(logits_of(moe, x))
    router_grad = torch.autograd.grad(wanted, moe.router.weight)[0]
    moe(x)
    update_expert_bias(moe, 0, 10)
    for rank in found:
        torch.testing.assert_close(torch.tensor(rank["value"]), wanted.detach())
        torch.testing.assert_close(torch.tensor(rank["router_grad"]), router_grad)
        torch.testing.assert_close(torch.tensor(rank["bias"]), moe.router.expert_bias)


def sequences_on_ranks() -> tuple[float, list]:
    """Halves of the same two sequences on two ranks: each has its part of the mean over tokens."""
    rank = dist.get_rank()
    moe = layer(aux_loss_weight=1.0, aux_scope="sequence")
    moe.sequence_group = dist.group.WORLD
    moe(all_rows(12).view(2, 6, D)[:, 3 * rank : 3 * rank + 3])
    total = aux_losses(moe).total
    total.backward()
    value = total.detach()
    for tensor in (value, moe.router.weight.grad):
        dist.all_reduce(tensor)
    return value.item(), moe.router.weight.grad.tolist()


@pytest.mark.distributed
def test_a_sequence_over_two_ranks_is_one_sequence() -> None:
    moe = layer()
    wanted = torch.stack([switch(logits_of(moe, r)) for r in all_rows(12).view(2, 6, D)]).mean()
    router_grad = torch.autograd.grad(wanted, moe.router.weight)[0]
    for value, gradient in run_on_ranks(2, sequences_on_ranks):
        torch.testing.assert_close(torch.tensor(value), wanted.detach())
        torch.testing.assert_close(torch.tensor(gradient), router_grad)


def bias_under_fsdp() -> tuple[list, list, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = torch.nn.Sequential(layer(bias_update_rate=0.1))
    mesh = init_device_mesh(device().type, (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    x = all_rows(8)[4 * dist.get_rank() :][:4]
    model(x).float().sum().backward()
    counts = model[0].counters.step_counts.clone()
    dist.all_reduce(counts)
    update_expert_bias(model, 0, 10, groups=mesh.get_group())
    before = model[0].router.expert_bias.tolist()
    model[0].router.expert_bias[1] += 100.0
    model[0].statistics(reset=True)
    model(x)
    assert model[0].statistics()["counts"][1] == 4
    return (
        before,
        (0.1 * torch.sign(counts.float().mean() - counts)).tolist(),
        str(model[0].router.expert_bias.dtype),
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_F16_the_bias_update_reaches_the_next_forward_under_fsdp2() -> None:
    for bias, wanted, dtype in run_on_ranks(2, bias_under_fsdp):
        torch.testing.assert_close(torch.tensor(bias), torch.tensor(wanted))
        assert any(bias)
        assert dtype == "torch.float32"

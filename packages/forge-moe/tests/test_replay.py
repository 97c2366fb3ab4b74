"""Recomputation: the same routes bit for bit, counted once, however often it happens."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from forge_moe import MoE, MoEConfig, aux_losses, recompute_contexts, update_expert_bias
from forge_moe.replay import record_or_replay, replaying

pytestmark = pytest.mark.lane("test")

SETTINGS = {"bias_update_rate": 0.1, "aux": "attach", "aux_loss_weight": 0.1}


def layer(**settings) -> MoE:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(8, 8, 4, **{**SETTINGS, **settings}))
    moe.router.weight.data = torch.randint(-1, 2, (4, 8)) / 2.0
    return moe


def tied_tokens() -> torch.Tensor:
    """On the grid of the router's weights: many tokens have equal logits for several experts."""
    return torch.randint(-1, 2, (40, 8), generator=torch.Generator().manual_seed(1)) / 2.0


def gradients(moe: MoE) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in moe.parameters()]
    moe.zero_grad()
    return found


def test_the_tokens_are_tied() -> None:
    logits = tied_tokens() @ layer().router.weight.T
    best = logits.topk(3).values
    assert (best[:, 1] == best[:, 2]).sum() > 5


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"capacity_factor": 0.7, "drop_policy": "probability"},
        {"aux_scope": "global_batch"},
        {"aux_scope": "sequence"},
    ],
)
def test_F28_recomputation_takes_the_routes_of_its_forward(settings: dict) -> None:
    """The biases move between forward and backward, so that choosing anew would send tokens elsewhere."""
    moe, x = layer(**settings), tied_tokens().view(2, -1, 8)
    plain = x.clone().requires_grad_()
    moe(plain).square().sum().backward()
    wanted, again = [*gradients(moe), plain.grad], x.clone().requires_grad_()
    moe.counters.take_step(x.device)
    y = checkpoint(moe, again, use_reentrant=False, context_fn=recompute_contexts)
    moe.router.expert_bias.copy_(torch.tensor([0.0, 3.0, -3.0, 1.0]))
    y.square().sum().backward()
    for a, b in zip([*gradients(moe), again.grad], wanted):
        assert torch.equal(a, b)


def test_F17_recomputation_is_counted_once_with_and_without_contexts() -> None:
    x = tied_tokens()
    for context in ({}, {"context_fn": recompute_contexts}):
        for reentrant in (False, True) if not context else (False,):
            moe = layer()
            row = x.clone().requires_grad_()
            y = checkpoint(moe, row, use_reentrant=reentrant, **context)
            y.sum().backward()
            assert moe.counters.step_counts.sum() == 80
            statistics = moe.statistics()
            assert (statistics["counts"].sum(), statistics["tokens"]) == (80, 40)


def test_popped_twice_as_zero_bubble_does() -> None:
    """Gradients of the inputs first, those of the weights later: each half recomputes the block."""
    moe, x = layer(), tied_tokens().requires_grad_()
    wanted = torch.autograd.grad(moe(x).square().sum(), [x, *moe.parameters()])
    routes = []
    route = moe.router.route
    moe.router.route = lambda *a: (r := route(*a), routes.append(r.ids))[0]
    moe.counters.take_step(x.device)
    y = checkpoint(moe, x, use_reentrant=False, context_fn=recompute_contexts).square().sum()
    moe.router.expert_bias.copy_(torch.tensor([5.0, 0.0, -5.0, 1.0]))
    halves = torch.autograd.grad(y, [x], retain_graph=True)
    halves += torch.autograd.grad(y, list(moe.parameters()))
    assert len(routes) == 3
    assert torch.equal(routes[0], routes[1])
    assert torch.equal(routes[0], routes[2])
    assert moe.counters.step_counts.sum() == 80
    for a, b in zip(halves, wanted):
        assert torch.equal(a, b)


def test_returned_losses_pass_through_a_checkpoint() -> None:
    x = tied_tokens()
    plain, again = layer(aux="return"), layer(aux="return")
    (plain(x).sum() + aux_losses(plain).total).backward()
    y = checkpoint(again, x, use_reentrant=False, context_fn=recompute_contexts)
    (y.sum() + aux_losses(again).total).backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(again)))
    assert again.pending_losses is None


def test_checkpoints_in_checkpoints() -> None:
    first, second, x = layer(), layer(), tied_tokens()

    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(first, x, use_reentrant=False, context_fn=recompute_contexts)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return second(inner(x) + x)

    plain = x.clone().requires_grad_()
    outer(plain).square().sum().backward()
    wanted = [plain.grad, *gradients(first), *gradients(second)]
    again = x.clone().requires_grad_()
    y = checkpoint(outer, again, use_reentrant=False, context_fn=recompute_contexts)
    first.router.expert_bias.copy_(torch.tensor([0.0, 3.0, -3.0, 1.0]))
    y.square().sum().backward()
    for a, b in zip([again.grad, *gradients(first), *gradients(second)], wanted):
        assert torch.equal(a, b)
    assert first.counters.step_counts.sum() == second.counters.step_counts.sum() == 160


def test_the_scale_of_the_forward_is_replayed() -> None:
    plain, again, x = layer(), layer(), tied_tokens()
    plain.aux_scale = again.aux_scale = torch.tensor(0.5)
    plain(x).sum().backward()
    y = checkpoint(again, x, use_reentrant=False, context_fn=recompute_contexts)
    again.aux_scale = torch.tensor(7.0)  # the next micro-batch's
    y.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(again)))


def test_global_batch_without_contexts_is_rejected() -> None:
    moe = layer(aux_scope="global_batch")
    y = checkpoint(moe, tied_tokens(), use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"give checkpoint.*recompute_contexts"):
        y.sum().backward()


def test_another_order_of_layers_is_rejected() -> None:
    record, replay = recompute_contexts()
    one, other = object(), object()
    with record:
        assert record_or_replay(one, "ids", lambda: 1) == 1
    with replay:
        assert replaying()
        with pytest.raises(RuntimeError, match="needs 'ids' of object as value 0 of 1"):
            record_or_replay(other, "ids", lambda: 2)
    for _ in range(2):
        with replay:
            assert record_or_replay(one, "ids", lambda: 2) == 1
            with pytest.raises(RuntimeError, match="value 1 of 1"):
                record_or_replay(one, "ids", lambda: 2)
    assert not replaying()


def test_a_step_after_recomputation_moves_the_bias_once() -> None:
    moe, x = layer(), torch.randn(40, 8)
    y = checkpoint(moe, x, use_reentrant=False, context_fn=recompute_contexts)
    y.sum().backward()
    update_expert_bias(moe, 0, 10)
    found = moe.router.expert_bias.abs()
    assert found.max() == torch.tensor(0.1)


def test_replay_outside_a_backward_keeps_drops_and_counts_nothing() -> None:
    moe, x = layer(capacity_factor=0.7, drop_policy="probability"), tied_tokens()
    taken = []
    dispatch = moe.dispatcher.dispatch
    moe.dispatcher.dispatch = lambda x, weights, ids, **options: (
        taken.append(ids),
        dispatch(x, weights, ids, **options),
    )[1]
    record, replay = recompute_contexts()
    with record:
        moe(x)
    moe.router.weight.data.neg_()  # as if rounding had turned all weights around
    with replay:
        moe(x)
    assert torch.equal(taken[0], taken[1])
    assert moe.counters.step_counts.sum() == 80

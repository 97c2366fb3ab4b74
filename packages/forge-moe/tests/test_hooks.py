"""MoEHooks: the calls of a training loop, against the same by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forge_moe import MoE, MoEConfig, MoEHooks, register_expert_bias_update, update_expert_bias
from forge_moe.hooks import num_experts_by_layer, whole_batch_options
from forge_moe.load_balancing import RoutingCounters
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects
from forge_testing.traffic import Traffic

pytestmark = pytest.mark.lane("test")

E = 4


def make_model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = MoEConfig(dim=8, hidden_dim=8, num_experts=E, aux="attach", **options)
    return nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8), MoE(config)])}).to(device())


def run(model: nn.Module, seed: int, rows: int = 6) -> torch.Tensor:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    first, moe = model["layers"]  # type: ignore[index]
    y: torch.Tensor = moe(first(x))
    return y


def test_columns_are_those_of_the_counts() -> None:
    model = make_model(capacity_factor=0.5)
    hooks = MoEHooks(model)
    run(model, 1)
    moe = model["layers"][1]  # type: ignore[index]
    found = moe.statistics()
    counts = found["counts"].double()
    sums = hooks.take().tolist()
    columns = hooks.columns(sums)
    loads = hooks.loads(sums)["moe.1.load"]
    assert loads == pytest.approx((counts / counts.mean()).tolist(), abs=1e-4)
    assert columns["moe.1.max_load"] == pytest.approx(float(counts.max() / counts.mean()))
    assert columns["moe.1.min_load"] == pytest.approx(float(counts.min() / counts.mean()))
    assert columns["moe.1.dead"] == float((counts == 0).sum())
    dropped = float(found["dropped"]) / float(counts.sum())
    assert columns["moe.1.drop_rate"] == pytest.approx(dropped, abs=1e-6)
    assert columns["moe.1.drop_rate"] > 0
    assert columns["moe.1.max_bias"] == 0.0
    untouched = hooks.take().tolist()
    assert sum(untouched) == 0  # taken
    assert hooks.loads(untouched) == {"moe.1.load": [0.0] * E}


def test_the_end_of_a_step_moves_biases_unless_it_is_skipped_and_forget_drops_counts() -> None:
    model, other = (make_model(bias_update_rate=0.1) for _ in range(2))
    hooks = MoEHooks(model)
    for step, skip in enumerate((torch.zeros(()), torch.ones(()))):
        for m in (model, other):
            run(m, 1).sum().backward()
        hooks.end_step(step, 2, skip)
        update_expert_bias(other, step, 2, groups=(), skip=skip)
    bias, wanted = (m["layers"][1].router.expert_bias for m in (model, other))  # type: ignore[index]
    assert torch.equal(bias, wanted)
    assert bias.abs().max() > 0
    hooks.forget()
    assert hooks.take()[:E].sum() == 0
    run(model, 2)
    assert hooks.columns(hooks.take().tolist())["moe.1.max_bias"] == pytest.approx(0.1)


@pytest.mark.parametrize("options", [{}, {"bias_update_rate": 0.1}], ids=["", "bias"])
def test_statistics_stay_on_their_device_when_nothing_was_counted(options: dict[str, Any]) -> None:
    """A save after a row has no counts: its sums were on the CPU, and the next row could not add them."""
    counters = RoutingCounters(E)
    counters.add(torch.ones(E, dtype=torch.int64, device="meta"), {"tokens": 1}, training=True)
    counters.reset()
    assert {t.device.type for t in counters.read().values()} == {"meta"}
    hooks = MoEHooks(make_model(**options), device=torch.device("meta"))  # before the first forward
    assert hooks.take().device.type == "meta"


def test_a_save_copies_no_number_to_the_device() -> None:
    """On a GPU the host waits for the copy, once for each layer."""
    model = make_model(bias_update_rate=0.1)
    hooks = MoEHooks(model)
    run(model, 1)
    with Traffic() as traffic:
        assert hooks.state_dict()[-1] == 0.0
    assert traffic.calls["copy_"] == 0


#: Two micro-batches of rows with 6 and 5, and with 1 and 2 tokens that are no padding; the first row has two documents.
LENGTHS, FIRST_DOCUMENT = (6, 5, 1, 2), 4
LAGGED = torch.tensor([5, 3, 2, 1])  # counts of the step before
LOSSES = {
    "z_loss_weight": ("z", ""),
    "sequence_loss_weight": ("", "sequence"),
    **{scope: ("", scope) for scope in ("sequence", "micro_batch", "global_batch_lagged")},
}


def of_each_token(logits: torch.Tensor, kind: tuple[str, str]) -> torch.Tensor:
    """The loss of each token with logits (T, E) and its own experts; the sum over the tokens of a micro-batch."""
    z, scope = kind
    if z:
        return sum(row.logsumexp(-1) ** 2 for row in logits)  # type: ignore[return-value]
    chosen = torch.zeros(E, dtype=torch.float64)
    for row in logits:
        chosen[row.topk(2).indices] += 1
    counts = LAGGED.double() if scope.endswith("lagged") else chosen
    shares = counts / counts.sum()
    return sum(E * (shares * row.softmax(-1)).sum() for row in logits)  # type: ignore[return-value]


@pytest.mark.parametrize("name", LOSSES)
def test_F147_router_losses_give_each_token_one_weight(name: str) -> None:
    """Means over all tokens of the step, whatever micro-batches they are in and how many rows or pads these have."""
    kind = LOSSES[name]
    keys: dict[str, Any] = (
        {name: 0.5} if name.endswith("weight") else {"aux_loss_weight": 0.5, "aux_scope": name}
    )
    torch.manual_seed(0)
    moe = MoE(MoEConfig(dim=8, hidden_dim=8, num_experts=E, aux="attach", **keys)).to(device())
    if moe.lagged_counts is not None:
        moe.lagged_counts.copy_(LAGGED)
    hooks = MoEHooks(moe)
    x, lengths = torch.randn(4, 6, 8, device=device()), torch.tensor(LENGTHS)[:, None]
    place = torch.arange(6).expand(4, 6)
    documents = torch.where(place < FIRST_DOCUMENT, 0, 1).where(lengths == 6, 0)
    documents = documents.where(place < lengths, -1).to(x.device)
    for number, rows in enumerate((slice(0, 2), slice(2, 4))):
        ids = documents[rows]
        y = moe(x[rows], SimpleNamespace(valid=ids >= 0, document_ids=ids))
        if not number:
            hooks.set_tokens(sum(LENGTHS))  # known after the first forward
        (0.0 * y).sum().backward()
    weight = moe.router.weight.detach().double().cpu().requires_grad_()
    parts = {"sequence": [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]}.get(
        kind[1], [(0, None), (2, None)]
    )
    total = torch.zeros((), dtype=torch.float64)
    for row, document in parts:
        rows = slice(row, row + 2) if document is None else slice(row, row + 1)
        inside = (documents[rows] >= 0) if document is None else documents[rows] == document
        total = total + of_each_token(x[rows][inside].double().cpu() @ weight.mT, kind)
    (wanted,) = torch.autograd.grad(0.5 * total / sum(LENGTHS), weight)
    torch.testing.assert_close(moe.router.weight.grad.double().cpu(), wanted, rtol=1e-5, atol=1e-7)


def test_a_model_without_mixtures_has_no_columns() -> None:
    hooks = MoEHooks(nn.Linear(2, 2))
    hooks.end_step(0, 1, torch.zeros(()))
    hooks.forget()
    assert hooks.columns(hooks.take().tolist()) == {}


def test_layers_report_their_experts_and_what_needs_the_full_batch() -> None:
    model = make_model(capacity_factor=2.0)
    assert num_experts_by_layer(model) == {"layers.1": E}
    assert whole_batch_options(model) == {"layers.1.capacity_factor 2.0": "no capacity"}
    assert whole_batch_options(make_model()) == {}


def _of_two_stages(rank: int) -> dict[str, float]:
    """Each rank has one of two layers, as the stages of a pipeline do."""
    model = make_model(bias_update_rate=0.1)
    name = f"layers.{rank + 1}"
    own = nn.ModuleDict({"layers": nn.ModuleDict({str(rank + 1): model["layers"][1]})})  # type: ignore[index]
    hooks = MoEHooks(own, num_experts={"layers.1": E, "layers.2": E})
    assert num_experts_by_layer(own) == {name: E}
    own["layers"][str(rank + 1)](torch.randn(3 + rank, 8).to(device()))  # type: ignore[index]
    return hooks.columns(hooks.take().tolist())


@pytest.mark.lane("quick")
def test_ranks_of_two_stages_have_the_columns_of_both() -> None:
    first, second = run_on_ranks(2, _rank_of_two_stages)
    assert first == second
    assert {name.split(".")[1] for name in first} == {"1", "2"}
    assert all(first[f"moe.{layer}.max_load"] >= 1.0 for layer in (1, 2))


def _rank_of_two_stages() -> dict[str, float]:
    return _of_two_stages(dist.get_rank())


def bias_after(steps: int, optimizer_steps: bool, schedule: str, skipped: int = -1) -> torch.Tensor:
    """The bias after steps of SGD, by the hook or by a call after each step."""
    torch.manual_seed(0)
    moe = MoE(dim=8, hidden_dim=8, num_experts=4, bias_update_rate=0.1, bias_schedule=schedule)
    optimizer: Any = Masked(moe.parameters(), lr=0.0)
    total = None if schedule == "constant" else steps
    if optimizer_steps:
        register_expert_bias_update(optimizer, moe, total)
    for step in range(steps):
        moe(torch.randn(16, 8, generator=torch.Generator().manual_seed(step))).sum().backward()
        skip = torch.tensor(float(step == skipped))
        optimizer.step(skip=skip)
        if not optimizer_steps:
            update_expert_bias(moe, None if total is None else step, total, skip=skip)
    return moe.router.expert_bias


class Masked(torch.optim.SGD):
    """A torch optimizer whose step may be masked."""

    def step(self, closure: Any = None, *, skip: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("schedule", ["constant", "linear_warmup"])
@pytest.mark.parametrize("skipped", [-1, 2])
def test_a_hook_of_the_optimizer_moves_the_biases(schedule: str, skipped: int) -> None:
    torch.optim.SGD([torch.zeros(1)])  # torch then calls hooks in the step of each class
    steps = 5 if skipped < 0 else 6  # an odd number of updates does not end at 0
    by_hook = bias_after(steps, True, schedule, skipped)
    assert by_hook.abs().max() > 0.01
    assert torch.equal(by_hook, bias_after(steps, False, schedule, skipped))


def test_a_hook_goes_on_from_its_first_step_and_can_be_removed() -> None:
    moe = MoE(dim=8, hidden_dim=8, num_experts=4, bias_update_rate=0.1, bias_schedule="cosine")
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.0)
    with rejects("bias_schedule", "cosine", "missing"):
        update_expert_bias(moe)
    handle = register_expert_bias_update(optimizer, moe, 10, first_step=9)
    moe(torch.randn(16, 8))
    optimizer.step()
    last = 0.1 * (1 + math.cos(math.pi * 0.9)) / 2
    assert moe.router.expert_bias.abs().max() == pytest.approx(last)
    handle.remove()
    before = moe.router.expert_bias.clone()
    optimizer.step()
    assert torch.equal(moe.router.expert_bias, before)

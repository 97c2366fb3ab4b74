"""Router losses where ranks hold parts of the same rows: their parts add up to one process.

Rows are cut as context parallelism cuts them (chunks r and 2 W - 1 - r of 2 W), and then over tensor
parallel ranks. Shapes: B rows, S tokens, E experts, K slots, D width.
"""

import contextlib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from forge_moe import (
    MoE,
    MoEConfig,
    aux_losses,
    load_balancing,
    recompute_contexts,
    set_aux_scale,
    update_expert_bias,
)
from forge_testing import device, run_on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

B, S, D, E, K = 2, 16, 8, 4, 2
SCOPES = ["sequence", "micro_batch", "global_batch", "global_batch_lagged"]

# Ids of documents, negative on pads. A document may begin and end in any chunk, and then a rank sees two
# runs of it; the same id means another document in another row; a rank may have nothing but pads.
DOCUMENTS = {
    "whole rows": None,
    "packed": [[0] * 3 + [1] + [2] * 9 + [3] * 3, [5] * 8 + [0] * 4 + [9] * 4],
    "pads at an end": [[0] * 16, [0] * 11 + [1] * 1 + [-1] * 4],
    "only pads": [[0] * 4 + [-1] * 8 + [1] * 4, [-1] * 16],
}


def layer(scope: str, aux: str) -> MoE:
    torch.manual_seed(0)
    weights = {"aux_loss_weight": 0.3, "sequence_loss_weight": 0.2, "z_loss_weight": 0.1}
    shape = {"dim": D, "hidden_dim": 8, "num_experts": E, "top_k": K, "bias_update_rate": 0.1}
    moe = MoE(MoEConfig(**shape, **weights, aux=aux, aux_scope=scope))
    torch.nn.init.normal_(moe.router.weight)
    if moe.lagged_counts is not None:
        moe.lagged_counts.copy_(torch.tensor([5, 1, 0, 2]))
    set_aux_scale(moe, torch.tensor(0.37))
    return moe.to(device())


class Context(SimpleNamespace):
    def once(self, key, make):
        kept = self.__dict__.setdefault("kept", {})
        if key not in kept:
            kept[key] = make()
        return kept[key]


def context(ids: Tensor | None, once: bool) -> SimpleNamespace:
    kind = Context if once else SimpleNamespace
    # as the host sees it: a mask where there are pads here, whatever others have
    valid = None if ids is None or bool((ids >= 0).all()) else ids >= 0
    return kind(document_ids=ids, valid=valid)


def batches(name: str) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
    """x and a weight of y for two micro-batches, and the document ids of both."""
    draw = torch.Generator().manual_seed(4)
    ids = DOCUMENTS[name]
    pairs = [torch.randn(2, B, S, D, generator=draw).to(device()).unbind() for _ in range(2)]
    return pairs, None if ids is None else torch.tensor(ids, device=device())


def run(moe: MoE, name: str, cut, once: bool) -> dict[str, Tensor]:
    """Two micro-batches of a step: losses or None, gradients, bias."""
    pairs, ids = batches(name)
    values = []
    for x, weight in pairs:
        x = cut(x).detach().requires_grad_()
        y = moe(x, context(None if ids is None else cut(ids), once))
        loss = (y * cut(weight)).sum() * 0.01
        if moe.config.aux == "return":
            terms = aux_losses(moe)
            values.append(torch.stack(terms).detach())
            loss = loss + 0.37 * terms.total
        loss.backward()
    found = {"router": moe.router.weight.grad, "down": moe.experts.down_proj.grad}
    return found | ({"losses": torch.stack(values)} if values else {})


def cut_as(cp: int, tp: int, rank: int):
    """The part of rank = (cp rank, tp rank) of tensors (B, S, ...)."""
    c, t = divmod(rank, tp)

    def cut(x: Tensor) -> Tensor:
        chunks = x.chunk(2 * cp, 1)
        return torch.cat((chunks[c], chunks[2 * cp - 1 - c]), 1).chunk(tp, 1)[t].contiguous()

    return cut


def groups_of(cp: int, tp: int):
    if tp == 1:
        return dist.group.WORLD
    mesh = init_device_mesh(device().type, (cp, tp), mesh_dim_names=("cp", "tp"))
    return mesh.get_group("cp"), mesh.get_group("tp")


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def errors(cp: int, tp: int) -> dict[tuple, dict[str, float]]:
    """For every scope and layout of rows, of sums over ranks; and of the bias."""
    cut, groups, found = cut_as(cp, tp, dist.get_rank()), groups_of(cp, tp), {}
    for scope in SCOPES:
        for name in DOCUMENTS:
            for aux in ("return", "attach"):
                plain, moe = layer(scope, aux), layer(scope, aux)
                plain.data_group = moe.data_group = ()
                moe.sequence_group = groups
                wanted = run(plain, name, lambda x: x, once=True)
                got = run(moe, name, cut, once=aux == "attach")
                for value in got.values():
                    dist.all_reduce(value)
                update_expert_bias(plain, 0, 10, groups=())
                update_expert_bias(moe, 0, 10, groups=groups)
                wanted["bias"], got["bias"] = plain.router.expert_bias, moe.router.expert_bias
                found[scope, name, aux] = {k: error(got[k], wanted[k]) for k in wanted}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (1, 2), (4, 1), (2, 2)])
def test_every_scope_is_that_of_one_process(cp: int, tp: int) -> None:
    for found in run_on_ranks(cp * tp, errors, cp, tp):
        assert len(found) == len(SCOPES) * len(DOCUMENTS) * 2
        for case, worst in found.items():
            assert max(worst.values()) < 1e-6, (case, worst)


def with_data_ranks(all_of_them: bool) -> tuple[float, float]:
    """Data ranks 2 x context ranks 2: global_batch counts over all four."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "cp"))
    data, context = divmod(dist.get_rank(), 2)
    x = torch.randn(4, S, D, generator=torch.Generator().manual_seed(6)).to(device())
    plain, moe = layer("global_batch", "return"), layer("global_batch", "return")
    plain.data_group = ()
    moe.data_group = dist.group.WORLD if all_of_them else mesh.get_group("dp")
    moe.sequence_group = mesh.get_group("cp")
    plain(x)
    wanted = aux_losses(plain)
    wanted.total.backward()
    moe(cut_as(2, 1, context)(x.chunk(2)[data]))
    total = aux_losses(moe).total / 2  # two micro-batches of equal size
    total.backward()
    value, router_grad = total.detach(), moe.router.weight.grad
    dist.all_reduce(value)
    dist.all_reduce(router_grad)
    return error(value, wanted.total.detach()), error(router_grad, plain.router.weight.grad)


@pytest.mark.parametrize("all_of_them", [False, True])
def test_data_ranks_and_context_ranks_count_together(all_of_them: bool) -> None:
    for found in run_on_ranks(4, with_data_ranks, all_of_them):
        assert max(found) < 1e-6


@contextlib.contextmanager
def counted():
    """Counter of collectives while it is open."""
    calls: Counter[str] = Counter()

    def counting(name, real):
        def call(*args, **kwargs):
            calls[name] += 1
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((dist, "all_reduce"), (load_balancing, "all_gather")):
            patch.setattr(module, name, counting(name, getattr(module, name)))
        yield calls


def recomputed(scope: str) -> tuple:
    """A checkpointed step next to a plain one: errors, tokens counted, collectives of its backward."""
    cut = cut_as(2, 1, dist.get_rank())
    (x, weight), ids = batches("packed")[0][0], cut(batches("packed")[1])
    answers = []
    for context_fn in (None, recompute_contexts):
        moe = layer(scope, "attach")
        moe.data_group, moe.sequence_group = (), dist.group.WORLD
        ctx, part = context(ids, once=False), cut(x).requires_grad_()
        if context_fn is None:
            y = moe(part, ctx)
        else:
            y = checkpoint(moe, part, ctx, use_reentrant=False, context_fn=context_fn)
        with counted() as calls:
            (y * cut(weight)).sum().backward()
        counts = moe.statistics()["tokens"].item(), moe.counters.step_counts.sum().item()
        answers.append((moe.router.weight.grad, counts, sum(calls.values())))
    (grad, counts, _), (again, counts_again, calls) = answers
    return error(again, grad), counts == counts_again == (B * S // 2, B * S // 2 * K), calls


def test_recomputation_replays_shares_and_counts_nothing() -> None:
    for scope in SCOPES:
        for worst, same_counts, calls in run_on_ranks(2, recomputed, scope):
            assert (worst, same_counts, calls) == (0.0, True, 0), scope


def collectives(scope: str, once: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Calls of two layers in a forward of packed rows, in training and in eval."""
    cut, found = cut_as(2, 1, dist.get_rank()), []
    (x, _), ids = batches("packed")[0][0], cut(batches("packed")[1])
    layers = [layer(scope, "attach") for _ in range(2)]
    for training in (True, False):
        ctx = context(ids, once)
        with counted() as calls:
            for moe in layers:
                moe.data_group, moe.sequence_group = (), dist.group.WORLD
                moe.config = MoEConfig(
                    **{**vars(moe.config), "sequence_loss_weight": 0.0, "aux_scope": scope}
                )
                moe.train(training)(cut(x), ctx)
        found.append(dict(calls))
    return tuple(found)


def test_collectives_are_those_of_the_docstrings() -> None:
    of_scope = {"sequence": (0, 2), "micro_batch": (2, 0), "global_batch": (2, 0)}
    for once in (True, False):
        for scope, (reduces, gathers) in of_scope.items():
            tokens = 1 if once else 2
            ids = (1 if once else 2) if gathers else 0
            wanted = {"all_reduce": reduces + tokens, "all_gather": gathers + ids}
            for training, evaluating in run_on_ranks(2, collectives, scope, once):
                assert training == {k: v for k, v in wanted.items() if v}, (scope, once)
                assert evaluating == {}

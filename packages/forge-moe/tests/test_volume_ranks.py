"""The bytes handed to the collective are those of the README's formula: a token once per rank or node."""

import pytest
import torch
import torch.distributed as dist

from forge_moe import Router, RouterConfig
from forge_moe.dispatch import AllToAllDispatch, HierarchicalDispatch
from forge_testing import device, run_on_ranks

pytestmark = pytest.mark.lane("test")

EXPERTS, TOP_K, TOKENS = 16, 6, 20


class Bytes:
    """What this rank gives to all_to_all_single, by group: bytes to all ranks, and to others."""

    def __enter__(self):
        self.sent, self._exchange = {}, dist.all_to_all_single
        dist.all_to_all_single = self._count
        return self

    def __exit__(self, *_):
        dist.all_to_all_single = self._exchange

    def _count(self, out, rows, out_splits=None, in_splits=None, group=None, async_op=False):
        ranks = dist.get_world_size(group)
        sizes = in_splits or [rows.size(0) // ranks] * ranks
        row = rows.numel() // max(rows.size(0), 1) * rows.element_size()
        total, others = self.sent.get(group, (0, 0))
        total += sum(sizes) * row
        others += (sum(sizes) - sizes[dist.get_rank(group)]) * row
        self.sent[group] = (total, others)
        return self._exchange(out, rows, out_splits, in_splits, group, async_op)


def routes(rank, dim, limited):
    """This rank's x, weights and ids; `limited` to one of two groups."""
    torch.manual_seed(rank)
    x = torch.randn(TOKENS + rank, dim)
    groups = {"num_groups": 2, "top_groups": 1} if limited else {}
    torch.manual_seed(9)
    router = Router(RouterConfig(dim=dim, num_experts=EXPERTS, top_k=TOP_K, **groups))
    with torch.no_grad():
        weights, ids = router(x)
    ids[0] = EXPERTS  # a pad
    return x.to(device()), weights.to(device()), ids.to(device())


def slow_copies(ids, ranks):
    """Distinct ranks of each token, counted in Python."""
    size = EXPERTS // ranks
    visits = [r for token in ids.tolist() for r in {e // size for e in token if e < EXPERTS}]
    return [visits.count(r) for r in range(ranks)]


def volume(sent, received, *, dim, dtype, numbers, chunks=1, rank=None):
    """(forward, backward) bytes of one dispatch step that sends and receives these rows per rank.

    A row is D elements, K fp32 weights and K int32 ids, padded to 16 bytes; its gradient has no ids; a sum
    is D elements. Each rank pair and chunk exchanges `numbers` int64. `rank` leaves out a rank's own rows.
    """
    out = [n for r, n in enumerate(sent) if r != rank]
    back = [n for r, n in enumerate(received) if r != rank]
    width = dim * dtype.itemsize
    weights_end = -(-width // 4) * 4 + 4 * TOP_K
    row, row_grad = (-(-size // 16) * 16 for size in (weights_end + 4 * TOP_K, weights_end))
    counts = len(out) * chunks * numbers * 8
    return counts + sum(out) * row + sum(back) * width, sum(out) * width + sum(back) * row_grad


def one_step(dim, dtype, chunks):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, weights, ids = routes(rank, dim, False)
    dispatcher = AllToAllDispatch(dist.group.WORLD, EXPERTS, chunks=chunks)
    leaf = x.to(dtype).requires_grad_()
    found = []
    with Bytes() as forward:
        y, _ = dispatcher.run(leaf, weights.requires_grad_(), ids, lambda r, c, full: r * 1)
    with Bytes() as backward:
        y.sum().backward()
    for index, own in enumerate((None, rank)):
        wanted = volume(
            slow_copies(ids, world),
            [slow_copies(routes(r, dim, False)[2], world)[rank] for r in range(world)],
            dim=dim, dtype=dtype, numbers=TOP_K, chunks=chunks, rank=own,
        )  # fmt: skip
        found.append((tuple(b.sent[dist.group.WORLD][index] for b in (forward, backward)), wanted))
    return found


@pytest.mark.lane("quick")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("dim", "dtype", "chunks"),
    [(12, torch.float32, 1), (8, torch.bfloat16, 3), (7, torch.bfloat16, 1)],
)
def test_a_token_is_sent_once_per_rank_and_every_byte_is_counted(dim, dtype, chunks):
    for found in run_on_ranks(4, one_step, dim, dtype, chunks):
        for sent, wanted in found:
            assert sent == wanted


def two_steps(limited):
    rank = dist.get_rank()
    dim, dtype = 8, torch.float32
    node, place = divmod(rank, 2)
    between = dist.new_group([place, place + 2], use_local_synchronization=True)
    within = dist.new_group([2 * node, 2 * node + 1], use_local_synchronization=True)
    x, weights, ids = routes(rank, dim, limited)
    with Bytes() as seen:
        y, _ = HierarchicalDispatch(between, within, EXPERTS).run(
            x.requires_grad_(), weights.requires_grad_(), ids, lambda r, c, full: r * 1
        )
        y.sum().backward()
    all_ids = [routes(r, dim, limited)[2] for r in range(4)]
    width = {"dim": dim, "dtype": dtype}
    outer = volume(
        slow_copies(ids, 2), [slow_copies(all_ids[2 * v + place], 2)[node] for v in range(2)],
        numbers=1 + 2 * TOP_K, rank=node, **width,
    )  # fmt: skip

    # what this rank passes on: rows of the ranks with its place, to the ranks of its node
    def onward(source, target):
        return sum(slow_copies(all_ids[2 * v + source], 4)[2 * node + target] for v in range(2))

    inner = volume(
        [onward(place, j) for j in range(2)], [onward(j, place) for j in range(2)],
        numbers=TOP_K, rank=place, **width,
    )  # fmt: skip
    crossing = slow_copies(ids, 2)[1 - node]
    return (
        seen.sent[between][1] == sum(outer),
        seen.sent[within][1] == sum(inner),
        sum(slow_copies(ids, 2)), crossing, len(ids), sum(slow_copies(ids, 4)),
    )  # fmt: skip


@pytest.mark.distributed
def test_between_nodes_a_token_goes_once_and_groups_bound_it():
    free, limited = (run_on_ranks(4, two_steps, case) for case in (False, True))
    for outer, inner, *_ in free + limited:
        assert outer
        assert inner
    for _, _, nodes, crossing, tokens, ranks in free:
        assert crossing < tokens  # one row a token at most, whatever its 6 experts
        assert nodes < ranks  # fewer than an all-to-all over four ranks sends
    for _, _, nodes, _, tokens, _ in limited:
        assert nodes == tokens - 1  # top_groups = 1: one node for each token but the pad

"""Rows travel between real processes and come back as one process would have them."""

import re

import pytest
import torch
import torch.distributed as dist

from forge_moe import LocalDispatch
from forge_moe.dispatch import exchange as exchanges
from forge_moe.dispatch.all_to_all import AllToAllDispatch, HierarchicalDispatch, even_sizes
from forge_moe.dispatch.local import Permutation
from forge_moe.replay import recompute_contexts
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects
from forge_testing.traffic import Traffic

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

DIM = 12


def make(kind, num_experts, chunks=1):
    if kind == "all_to_all":
        return AllToAllDispatch(dist.group.WORLD, num_experts, chunks=chunks)
    half = dist.get_world_size() // 2
    place, node = dist.get_rank() % half, dist.get_rank() // half
    between = [dist.new_group([i, i + half]) for i in range(half)][place]
    within = [dist.new_group([n * half + i for i in range(half)]) for n in range(2)][node]
    return HierarchicalDispatch(between, within, num_experts, chunks=chunks)


def problem(tokens, num_experts, top_k, dtype=torch.float32, seed=0):
    """x, weights, ids, matrices and the gradient of y for all ranks together; some slots are dropped."""
    g = torch.Generator().manual_seed(seed)
    total = sum(tokens)
    x = torch.randn(total, DIM, generator=g).to(dtype)
    weights = torch.rand(total, top_k, generator=g)
    scores = torch.rand(total, num_experts, generator=g)
    ids = scores.topk(top_k, dim=1).indices
    ids[torch.rand(total, top_k, generator=g) < 0.1] = num_experts
    matrices = (torch.randn(num_experts, DIM, DIM, generator=g) * 0.3).to(dtype)
    grad = torch.randn(total, DIM, generator=g)
    return tuple(t.to(device()) for t in (x, weights, ids, matrices, grad))


def reference(x, weights, ids, matrices, grad):
    """Token by token in float64: y, and the gradients of x, weights and matrices."""
    x, weights, matrices = (t.double().requires_grad_() for t in (x, weights, matrices))
    nothing = (x.sum() + weights.sum() + matrices.sum()) * 0
    rows = []
    for t in range(x.size(0)):
        row = x[t] * 0
        for k, e in enumerate(ids[t].tolist()):
            if e < matrices.size(0):
                row = row + weights[t, k] * torch.tanh(x[t] @ matrices[e])
        rows.append(row)
    y = torch.stack(rows) if rows else x * 0
    ((y * grad.double()).sum() + nothing).backward()
    return y.detach(), x.grad, weights.grad, matrices.grad


def experts_of(matrices):
    """Loop over the experts of a rank: rows (R, D), counts (E_local,) -> (R, D)."""

    def call(rows, counts, full=False):
        parts = rows.split([*counts.tolist(), rows.size(0) - int(counts.sum())])
        outs = [torch.tanh(part @ m) for part, m in zip(parts, matrices.unbind(0))]
        return torch.cat([*outs, torch.zeros_like(parts[-1])])

    return call


def mine(tensor, tokens, rank):
    return tensor.split(tokens)[rank]


def run(dispatcher, tokens, num_experts, top_k, dtype=torch.float32, seed=0, run_whole=True):
    """This rank's y and gradients, and what the reference says of the same tokens and experts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everything = problem(tokens, num_experts, top_k, dtype, seed)
    x, weights, ids, _, grad = (
        mine(t, tokens, rank) for t in (*everything[:3], everything[0], everything[4])
    )
    matrices = everything[3].chunk(world)[rank].clone().requires_grad_()
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    experts = experts_of(matrices)
    if run_whole:
        y, _ = dispatcher.run(x, weights, ids, experts)
    else:
        rows, counts, meta = dispatcher.dispatch(x, weights, ids)
        y = dispatcher.combine(experts(rows, counts), meta)
    (y * grad).sum().backward()
    wanted = reference(*everything)
    wanted = [mine(t, tokens, rank) for t in wanted[:3]] + [wanted[3].chunk(world)[rank]]
    return [y.detach(), x.grad, weights.grad, matrices.grad], wanted


def error(found, wanted):
    if wanted.numel() == 0:
        return 0.0 if found.shape == wanted.shape else float("inf")
    scale = wanted.abs().max().clamp(min=1e-30)
    return ((found.double() - wanted).abs().max() / scale).item()


def errors(kind, tokens, num_experts, top_k, chunks, run_whole):
    dispatcher = make(kind, num_experts, chunks)
    found, wanted = run(dispatcher, tokens, num_experts, top_k, run_whole=run_whole)
    return [error(a, b) if b.abs().sum() else float(a.abs().sum()) for a, b in zip(found, wanted)]


# tokens per rank, experts, top-k, chunks
CASES = {
    "two ranks": ([5, 9], 4, 2, 1),
    "four ranks": ([7, 3, 11, 6], 8, 3, 1),
    "top-1": ([4, 4, 4, 4], 4, 1, 1),
    "all experts": ([3, 2, 4, 1], 8, 8, 1),
    "256 experts": ([6, 5, 8, 7], 256, 8, 1),
    "a rank without tokens": ([6, 0, 3, 0], 8, 2, 1),
    "no tokens at all": ([0, 0, 0, 0], 4, 2, 1),
    "chunks": ([9, 4, 7, 5], 8, 3, 2),
    "more chunks than tokens": ([2, 0, 1, 3], 8, 2, 4),
}


@pytest.mark.parametrize("kind", ["all_to_all", "hierarchical"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_equal_one_process(kind, case):
    tokens, num_experts, top_k, chunks = CASES[case]
    for rank in run_on_ranks(
        len(tokens), errors, kind, tokens, num_experts, top_k, chunks, chunks > 1
    ):
        assert max(rank) < 1e-5, (
            rank
        )  # fp32 against float64: y, and gradients of x, weights, experts


def idle(kind):
    """All tokens want expert 0: three ranks have rows to send and none to compute."""
    dispatcher = make(kind, 8)
    x = torch.randn(4, DIM, device=device(), requires_grad=True)
    weights = torch.rand(4, 2, device=device(), requires_grad=True)
    ids = torch.tensor([[0, 8]] * 4, device=device())
    matrices = torch.randn(2, DIM, DIM, device=device(), requires_grad=True)
    y, _ = dispatcher.run(x, weights, ids, experts_of(matrices))
    y.sum().backward()
    grads = [x.grad, weights.grad, matrices.grad]
    return [g is not None and bool(g.isfinite().all()) for g in grads], float(
        matrices.grad.abs().sum()
    )


@pytest.mark.parametrize("kind", ["all_to_all", "hierarchical"])
def test_F30_an_idle_rank_stays_in_the_graph(kind):
    results = run_on_ranks(4, idle, kind)
    assert all(all(has_gradient) for has_gradient, _ in results)
    assert [total > 0 for _, total in results] == [True, False, False, False]


def bits(kind, chunks):
    """y and the gradients of x and weights: once, again, and with chunks."""
    tokens = [9, 4, 7, 5]
    rank = dist.get_rank()
    x, weights, ids, matrices, grad = problem(tokens, 8, 3)
    x, weights, ids, grad = (mine(t, tokens, rank) for t in (x, weights, ids, grad))
    factors = matrices[2 * rank : 2 * rank + 2, 0]  # (2, D)

    def experts(rows, counts, full):
        return rows * factors.repeat_interleave(
            counts, 0
        )  # rounds alike in any batch, unlike a GEMM

    runs = []
    for n in (1, 1, chunks):
        a, b = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y, _ = make(kind, 8, n).run(a, b, ids, experts)
        runs.append((y, *torch.autograd.grad((y * grad).sum(), (a, b))))
    return [all(torch.equal(a, b) for a, b in zip(runs[0], other)) for other in runs[1:]]


@pytest.mark.parametrize("kind", ["all_to_all", "hierarchical"])
def test_the_same_bits_each_time_and_with_chunks(kind):
    assert run_on_ranks(4, bits, kind, 3) == [[True, True]] * 4


def transfer_error(kind):
    """y in bf16 against the same partial sums kept in fp32, with the stated bound."""
    tokens, num_experts = [16, 16, 16, 16], 8
    dispatcher = make(kind, num_experts)
    x, weights, ids, matrices, _ = problem(tokens, num_experts, 4, torch.bfloat16)
    rank = dist.get_rank()
    outputs = torch.tanh(torch.einsum("td,edf->tef", x, matrices)).float()  # (T, E, D)
    outputs = torch.cat((outputs, outputs.new_zeros(64, 1, DIM)), 1)
    chosen = outputs.gather(1, ids.unsqueeze(2).expand(-1, -1, DIM)) * weights.unsqueeze(2)
    node = ids // (num_experts // 2)
    parts = [(chosen * (ids // 2 == r).unsqueeze(2)).sum(1) for r in range(4)]
    bound = sum(p.abs() for p in parts)
    if kind == "hierarchical":
        bound = bound + sum((chosen * (node == v).unsqueeze(2)).sum(1).abs() for v in range(2))
    exact = sum(parts)

    def experts(rows, counts, full):
        # the same numbers whatever the shape of the batch: looked up, not computed
        source = mine_all(rows, x)
        expert = torch.repeat_interleave(torch.arange(2, device=device()) + 2 * rank, counts)
        return outputs[source, expert].to(torch.bfloat16)

    y, _ = dispatcher.run(
        mine(x, tokens, rank), mine(weights, tokens, rank), mine(ids, tokens, rank), experts
    )
    u = 2.0**-8  # half of bf16's epsilon
    allowed = mine(bound, tokens, rank) * u * 1.01 + 1e-6
    off = (y - mine(exact, tokens, rank)).abs()
    return y.dtype, float((off / allowed).max())


def mine_all(rows, x):
    """Which token each row is: rows are exact copies."""
    return (rows.unsqueeze(1) == x.unsqueeze(0)).all(2).float().argmax(1)


@pytest.mark.parametrize("kind", ["all_to_all", "hierarchical"])
def test_sums_are_rounded_for_the_transfer_within_the_stated_bound(kind):
    for dtype, used in run_on_ranks(4, transfer_error, kind):
        assert dtype == torch.float32
        assert 0.2 < used <= 1.0  # near the bound: the rounding happens, once a step


SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")


def syncs(kind, chunks):
    """Host reads of a forward and backward: split sizes, and any other."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        others = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.__name__.partition(".")[0]
            boolean = name == "index" and any(
                i is not None and i.dtype == torch.bool for i in args[1]
            )
            if name in SYNCS or boolean:
                self.others += (name,)
            return function(*args, **(kwargs or {}))

    asked, to_host = [], exchanges.to_host
    exchanges.to_host = lambda *counts: (asked.append(1), to_host(*counts))[1]
    try:
        dispatcher = make(kind, 8, chunks)
        x = torch.randn(6, DIM, device=device(), requires_grad=True)
        weights = torch.rand(6, 2, device=device(), requires_grad=True)
        ids = torch.rand(6, 8, device=device()).topk(2).indices
        with Count() as count:
            y, _ = dispatcher.run(x, weights, ids, lambda rows, counts, full: rows * 2)
            y.backward(torch.ones_like(y))
    finally:
        exchanges.to_host = to_host
    return len(asked), count.others


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all_to_all", "hierarchical"])
def test_one_host_sync_a_layer(kind):
    for chunks in (1, 3):
        assert run_on_ranks(4, syncs, kind, chunks) == [(1, ())] * 4


def recomputed(kind):
    """Exchanges of a checkpointed layer, by kind of rows; two backward passes, as zero-bubble does."""
    from torch.utils.checkpoint import checkpoint

    dispatcher = make(kind, 8, 2)
    tokens = [9, 4, 7, 5]
    rank = dist.get_rank()
    x, weights, ids, matrices, grad = problem(tokens, 8, 3)
    x, weights, ids, grad = (mine(t, tokens, rank) for t in (x, weights, ids, grad))
    matrices = matrices.chunk(4)[rank].clone().requires_grad_()
    sizes = []
    exchange = dist.all_to_all_single
    dist.all_to_all_single = lambda out, rows, *a, **k: (
        sizes.append(rows.dtype),
        exchange(out, rows, *a, **k),
    )[1]

    def layer(x, weights):
        return dispatcher.run(x, weights, ids, experts_of(matrices))[0]

    try:
        seen = []
        for context in (None, recompute_contexts):
            sizes.clear()
            a, b = x.clone().requires_grad_(), weights.clone().requires_grad_()
            if context is None:
                y = layer(a, b)
            else:
                y = checkpoint(layer, a, b, use_reentrant=False, context_fn=context)
            grads = torch.autograd.grad((y * grad).sum(), (a, b, matrices), retain_graph=True)
            again = torch.autograd.grad((y * grad).sum(), (a, b, matrices))
            seen.append((y, *grads, *again, sizes.count(torch.int64)))
    finally:
        dist.all_to_all_single = exchange
    plain, other = seen
    return all(torch.equal(p, o) for p, o in zip(plain[:-1], other[:-1])), plain[-1], other[-1]


@pytest.mark.parametrize(("kind", "steps"), [("all_to_all", 1), ("hierarchical", 2)])
def test_F28_recomputation_reuses_the_split_sizes(kind, steps):
    assert run_on_ranks(4, recomputed, kind) == [(True, steps, steps)] * 4


def events():
    """When exchanges begin and experts work, forward and backward."""
    log = []

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            log.append(name)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            log.append(ctx.name + "'")
            return grad, None

    exchange, wait = dist.all_to_all_single, exchanges._wait
    starts = []

    def start(out, rows, *args, **kwargs):
        work = exchange(out, rows, *args, **kwargs)
        if rows.dtype != torch.int64:
            log.append(f"go {len(starts)}")
            starts.append(work)
        return work

    def waited(transfer):
        log.append(f"end {[transfer.work is s for s in starts].index(True)}")
        return wait(transfer)

    to_host = exchanges.to_host
    exchanges.to_host = lambda copy: (log.append("sizes"), to_host(copy))[1]
    dist.all_to_all_single, exchanges._wait = start, waited
    calls = []

    def experts(rows, counts, full):
        calls.append(1)
        return Mark.apply(rows, f"experts {len(calls) - 1}")

    try:
        dispatcher = make("all_to_all", 4, 2)
        x = torch.randn(6, DIM, device=device(), requires_grad=True)
        ids = torch.rand(6, 4, device=device()).topk(2).indices
        shared = torch.randn(6, DIM, device=device(), requires_grad=True)
        y, alongside = dispatcher.run(
            x, torch.rand(6, 2, device=device()), ids, experts, lambda: Mark.apply(shared, "shared")
        )
        (y + alongside).sum().backward()
    finally:
        dist.all_to_all_single, exchanges._wait, exchanges.to_host = exchange, wait, to_host
    return log


def test_rows_travel_while_experts_work():
    # the shared experts are queued before the host waits for the sizes of the transfers
    forward = [
        "shared",
        "sizes",
        "go 0",
        "go 1",
        "end 0",
        "experts 0",
        "go 2",
        "end 1",
        "experts 1",
        "go 3",
    ]
    forward += ["end 2", "end 3"]
    # gradients of sums leave first, then those of rows leave under the other chunk's experts
    backward = ["go 4", "go 5", "end 4", "experts 1'", "go 6", "end 5", "experts 0'", "go 7"]
    backward += ["end 6", "shared'", "end 7"]
    assert run_on_ranks(2, events) == [forward + backward] * 2


def operators_after_the_sizes():
    """Operators between the host's wait for the sizes and the exchange of the tokens."""
    exchange, to_host, at = dist.all_to_all_single, exchanges.to_host, {}

    def sizes(copy):
        found = to_host(copy)
        at["sizes"] = traffic.calls.total()
        return found

    def start(out, rows, *args, **kwargs):
        if rows.dtype != torch.int64:
            at.setdefault("exchange", traffic.calls.total())
        return exchange(out, rows, *args, **kwargs)

    dist.all_to_all_single, exchanges.to_host = start, sizes
    try:
        x = torch.randn(6, DIM, device=device())
        ids = torch.rand(6, 4, device=device()).topk(2).indices
        weights = torch.rand(6, 2, device=device())
        with Traffic() as traffic:
            make("all_to_all", 4, 1).run(x, weights, ids, lambda rows, counts, full: rows)
    finally:
        dist.all_to_all_single, exchanges.to_host = exchange, to_host
    return at["exchange"] - at["sizes"]


def test_after_the_wait_rows_are_packed_and_nothing_is_planned():
    for operators in run_on_ranks(2, operators_after_the_sizes):
        assert operators <= 14  # a device without work waits for so many launches; it was 33


def test_chunks_are_even():
    assert even_sizes(10, 4) == [2, 3, 2, 3]
    assert even_sizes(2, 4) == [0, 1, 0, 1]


def refusals():
    with rejects("num_experts", 6, "divides") as caught:
        AllToAllDispatch(dist.group.WORLD, 6)
    with rejects("chunks", 0, "range"):
        AllToAllDispatch(dist.group.WORLD, 8, chunks=0)
    return caught.value.problems[0].fix


def test_wrong_arguments_are_rejected_with_rule_and_fix():
    numbers = re.findall(r"\d+", run_on_ranks(4, refusals)[0])
    assert numbers == ["8", "1", "2", "3", "6"]  # experts for 4 ranks; ranks for 6 experts


def widely_summed():
    """One token here that visits all four ranks; gradients 256, 1, 1, 1 of its rows come back."""
    x = torch.ones(1, DIM, dtype=torch.bfloat16, device=device(), requires_grad=True)
    weights = torch.ones(1, 4, device=device(), requires_grad=True)
    ids = torch.arange(4, device=device()).unsqueeze(0)
    sent = make("all_to_all", 4).dispatch(x, weights, ids)
    (sent.rows.float() * (256.0 if dist.get_rank() == 0 else 1.0)).sum().backward()
    return x.grad.unique().tolist()


def test_gradients_of_a_token_from_several_ranks_are_summed_in_fp32():
    """259 rounds to 260 in bf16; summed there, each 1 would be lost in 256."""
    assert run_on_ranks(4, widely_summed) == [[260.0]] * 4


def test_gradients_of_a_token_from_several_experts_here_are_summed_in_fp32():
    ids, grad = torch.arange(4).unsqueeze(0), torch.tensor([256.0, 1, 1, 1]).unsqueeze(1)
    for permute in (
        lambda x: Permutation.received(ids, 4, [1, 1, 1, 1]).permute(x),
        lambda x: LocalDispatch(4).dispatch(x, torch.ones(1, 4), ids).rows,
    ):
        x = torch.ones(1, DIM, dtype=torch.bfloat16, requires_grad=True)
        (permute(x).float() * grad).sum().backward()
        assert x.grad.unique().tolist() == [260.0]

"""Rows spread over ranks give what whole rows give in one process with a dense mask.

Shapes: B rows, S tokens, H query heads, K key/value heads, D width of a head, M width of the model.
"""

import copy
import dataclasses
import itertools
import re
from collections import Counter
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_parallel.axes import blockwise, context
from forge_parallel.axes.blockwise import chunks_of
from forge_parallel.axes.context import (
    SequenceShard,
    context_parallel,
    gather_sequence,
    packed_tiling,
    shard_sequence,
)
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

B, S, H, K, D, M = 2, 32, 4, 2, 8, 16

# Lengths of documents, row by row; the last one of "pads" is padding. With two ranks a chunk has 8
# tokens, with four 4.
ROWS = {
    "whole rows": None,
    "one document": [[32], [32]],
    "on the edges of chunks": [[8, 8, 16], [16, 4, 12]],
    "single tokens": [[1] * 32, [15, 1, 16]],
    "over three chunks and more": [[3, 22, 7], [30, 2]],
    "pads": [[10, 15, 7], [5, 27]],
    "two rows unlike": [[32], [1, 30, 1]],
}


SPEC = dataclasses.make_dataclass(
    "Spec", [(name, Any, None) for name in ("scale", "window", "softcap")]
)


def ids_of(name: str) -> Tensor | None:
    rows = ROWS[name]
    if rows is None:
        return None
    ids = torch.stack([torch.repeat_interleave(torch.tensor(lengths)) for lengths in rows])
    if name == "pads":
        ids[ids == ids.amax(1, keepdim=True)] = -1
    return ids.to(device())


def dense(q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, window: int | None = None) -> Tensor:
    """Causal attention with a mask (B, S, S), at the width of the inputs."""
    k, v = (t.repeat_interleave(q.size(2) // t.size(2), 2) for t in (k, v))
    seen = torch.ones(S, S, dtype=torch.bool, device=q.device).tril().expand(q.size(0), S, S)
    if window is not None:
        seen = seen.triu(1 - window)
    if ids is not None:
        seen = seen & (ids.unsqueeze(2) == ids.unsqueeze(1))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.size(-1) ** -0.5
    weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


class Context(SimpleNamespace):
    """What a model of one's own may hand to its attention."""

    def once(self, key, make):
        saved = self.__dict__.setdefault("saved", {})
        if key not in saved:
            saved[key] = make()
        return saved[key]


def attend(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    return dense(q, k, v, ctx.document_ids)


attend.is_causal = True  # type: ignore[attr-defined]


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(M, H * D), nn.Linear(H * D, M)
        self.k, self.v = nn.Linear(M, K * D), nn.Linear(M, K * D)
        self.attend = attend

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, D)) for m in (self.q, self.k, self.v))
        return x + self.o(self.attend(q, k, v, ctx).flatten(-2))


class Model(nn.Module):
    """Two layers of attention over vectors (B, S, M), with a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(S, M)
        self.layers = nn.ModuleList(Mixer() for _ in range(2))

    def forward(self, x: Tensor, positions: Tensor | None = None, document_ids=None) -> Tensor:
        positions = torch.arange(x.size(1), device=x.device) if positions is None else positions
        x, ctx = x + self.table(positions), Context(document_ids=document_ids)
        for layer in self.layers:
            x = layer(x, ctx)
        return x


def built() -> Model:
    return Model().to(device())


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape).to(device())


def places() -> Tensor:
    return torch.arange(S, device=device())


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def axis_of_all() -> SimpleNamespace:
    return SimpleNamespace(rank=dist.get_rank(), size=dist.get_world_size(), group=dist.group.WORLD)


def attention_errors(
    exchange: str, dtype: torch.dtype, kv_heads: int, window: int | None = None
) -> dict[str, float]:
    """Worst error of the output and the gradients of q, k and v, per case."""
    axis, found, mixer = axis_of_all(), {}, Mixer()
    mixer.attend = SimpleNamespace(spec=SPEC(window=window))
    module = context_parallel(mixer, axis, exchange)
    for name in ROWS:
        torch.manual_seed(1)
        q, weight = torch.randn(2, B, S, H, D).to(device(), dtype)
        k, v = torch.randn(2, B, S, kv_heads, D).to(device(), dtype)
        ids = ids_of(name)
        whole = [t.double().requires_grad_() for t in (q, k, v)]
        wanted = dense(*whole, ids, window)
        (wanted * weight.double()).sum().backward()
        parts = [shard_sequence(t.detach(), axis).requires_grad_() for t in (q, k, v)]
        local = None if ids is None else shard_sequence(ids, axis)
        out = module.attend(*parts, Context(document_ids=local))
        (out * shard_sequence(weight, axis)).sum().backward()
        assert out.dtype == parts[1].grad.dtype == dtype
        pairs = [(out, wanted), *((a.grad, b.grad) for a, b in zip(parts, whole))]
        found[name] = max(error(a, shard_sequence(b, axis)) for a, b in pairs)
    return found


# bf16: as in test_context_blockwise, and keys' gradients of several ranks are summed in fp32.
@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
@pytest.mark.parametrize("world", [2, 4])
def test_attention_over_ranks_equals_a_dense_mask(
    world: int, exchange: str, dtype: torch.dtype, bound: float
) -> None:
    for kv_heads in (K, H):
        for found in run_on_ranks(world, attention_errors, exchange, dtype, kv_heads):
            assert list(found) == list(ROWS)
            assert max(found.values()) < bound, found


# With two ranks a chunk has 8 tokens, with four 4.
SLOW = [pytest.mark.slow, pytest.mark.lane("ci")]


@pytest.mark.parametrize(
    "window", [3, 11, 31, *(pytest.param(window, marks=SLOW) for window in (2, 8, 32, 50))]
)
@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_window_over_ranks_equals_a_dense_mask(world: int, exchange: str, window: int) -> None:
    for found in run_on_ranks(world, attention_errors, exchange, torch.float64, K, window):
        assert max(found.values()) < 1e-12, found
    if window == 11:
        for found in run_on_ranks(world, attention_errors, exchange, torch.float32, K, window):
            assert max(found.values()) < 1e-5, found


def seen_pairs(place: SequenceShard, lengths: list[list[int]] | None) -> tuple[Tensor, int]:
    """How often each query (B, S) of whole rows meets each key in the tiles of a rank, and the pairs they compute."""
    rows = [[S]] * B if lengths is None else lengths
    borders = [[0, *accumulate(row)] for row in rows]
    tiling = packed_tiling([list(pairwise(row)) for row in borders], place)
    count, computed = torch.zeros(B, S, S, dtype=torch.int64), 0
    chunk, size = place.length // 2, place.size
    at = [torch.cat([torch.arange(n * chunk, (n + 1) * chunk) for n in chunks_of(r, size)])
          for r in range(size)]  # fmt: skip
    for part, tiles in enumerate(tiling.parts):
        keys = at[(place.rank - part) % size]
        if place.exchange == "all_gather" and part == 1:
            keys = torch.arange(S)
        for t in tiles:
            block = torch.ones(t.queries, t.keys, dtype=torch.int64)
            if t.causal:
                block = block.triu() if t.backwards else block.tril()
            where = at[place.rank][t.query : t.query + t.queries][:, None]
            into = where, keys[t.key : t.key + t.keys]
            for row in range(B) if t.sequence is None else [t.sequence]:
                count[row][into] += block
            computed += int(block.sum()) * (B if t.sequence is None else 1)
    return count, computed


@pytest.mark.lane("quick")
@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
@pytest.mark.parametrize("name", ROWS)
def test_tiles_of_a_window_hold_each_pair_once_and_no_other(name: str, exchange: str) -> None:
    ids = ids_of(name) if name != "pads" else None
    seen = torch.ones(S, S, dtype=torch.bool).tril().expand(B, S, S)
    if ids is not None:
        seen = seen & (ids.unsqueeze(2) == ids.unsqueeze(1))
    for size, window in itertools.product((1, 2, 4), range(1, S + 2)):
        places = [SequenceShard(S // size, rank, size, exchange, window) for rank in range(size)]
        lengths = ROWS[name] if ids is not None else None
        found = [seen_pairs(place, lengths) for place in places]
        wanted = seen.triu(1 - window).long()
        assert torch.equal(sum(count for count, _ in found), wanted), (size, window)
        assert sum(computed for _, computed in found) == wanted.sum()


def model_errors(exchange: str) -> dict[str, dict[str, float]]:
    """Error of the rows, joined again, and of every gradient, per case."""
    axis, found = axis_of_all(), {}
    for name in ROWS:
        torch.manual_seed(2)
        model, x, weight = built(), drawn(B, S, M), drawn(B, S, M)
        plain, ids, positions = copy.deepcopy(model), ids_of(name), places().expand(B, S)
        wanted = plain(x, positions, ids)
        (wanted * weight).sum().backward()
        model = context_parallel(model, axis, exchange)
        cut = [None if t is None else shard_sequence(t, axis) for t in (x, positions, ids)]
        out = model(*cut)
        (out * shard_sequence(weight, axis)).sum().backward()
        errors = {"out": error(gather_sequence(out, axis), wanted)}
        for (key, a), b in zip(model.named_parameters(), plain.parameters()):
            dist.all_reduce(a.grad)
            errors[key] = error(a.grad, b.grad)
        found[name] = errors
    return found


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_model_over_ranks_equals_one_process(world: int, exchange: str) -> None:
    for cases in run_on_ranks(world, model_errors, exchange):
        for name, errors in cases.items():
            for key, worst in errors.items():
                # a key's bias shifts all scores of a query alike: its gradient is 0, and what is left
                # is rounding
                assert worst < 1e-5 or key.endswith("k.bias"), (name, key, worst)


def whole_rows_of_ids(exchange: str) -> list[tuple[bool, dict[str, int]]]:
    """Whether ids of whole rows give what cut ones give, and what the forward sent and read."""
    axis, found = axis_of_all(), []
    torch.manual_seed(2)
    model, x = context_parallel(built(), axis, exchange), shard_sequence(drawn(B, S, M), axis)
    positions = shard_sequence(places()[None], axis)
    for name in ROWS:
        ids = ids_of(name)
        if ids is None:
            continue
        calls: Counter[str] = Counter()
        with pytest.MonkeyPatch.context() as patch:
            for place, call in ((context, "start_all_gather"), (torch.Tensor, "cpu")):
                original = getattr(place, call)
                patch.setattr(
                    place, call, lambda *a, o=original, c=call, n=calls: (n.update([c]), o(*a))[1]
                )
            out = model(x, positions, document_ids=ids)
        found.append(
            (torch.equal(out, model(x, positions, shard_sequence(ids, axis))), dict(calls))
        )
    return found


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_F120_ids_of_full_sequences_on_the_host_cost_no_wait(exchange: str) -> None:
    for found in run_on_ranks(2, whole_rows_of_ids, exchange):
        assert len(found) == len(ROWS) - 1
        assert all(same and calls == {} for same, calls in found), found


def with_and_without_ids(exchange: str) -> tuple[float, float]:
    axis, ids = axis_of_all(), ids_of("over three chunks and more")
    torch.manual_seed(2)
    model, x, positions = built(), drawn(B, S, M), places().expand(B, S)
    wanted = model(x, positions, ids)
    cut = [shard_sequence(t, axis) for t in (x, positions, ids)]
    model = context_parallel(model, axis, exchange)
    found = (model(*cut[: 3 - without], *[None] * without) for without in (0, 1))
    return tuple(error(gather_sequence(out, axis), wanted) for out in found)


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_F10_packing_reaches_attention_over_context_ranks(exchange: str) -> None:
    for packed, ignored in run_on_ranks(4, with_and_without_ids, exchange):
        assert packed < 1e-5
        assert ignored > 1e-2


def collectives(exchange: str, packed: bool, recompute: bool) -> list[dict[str, int]]:
    """Calls of forward and of backward of a model with two layers."""
    calls: Counter[str] = Counter()
    axis, ids, found = axis_of_all(), ids_of("pads") if packed else None, []

    def counted(name, call):
        def counting(*args):
            calls[name] += 1
            return call(*args)

        return counting

    model = context_parallel(built(), axis, exchange)
    if recompute:
        for layer in model.layers:
            layer.forward = checkpointed(layer.forward)
    x = shard_sequence(drawn(B, S, M), axis).requires_grad_()
    local = None if ids is None else shard_sequence(ids, axis)
    positions = shard_sequence(places()[None], axis)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (context, "start_all_gather"),
            (blockwise, "start_all_gather"),
            (blockwise, "start_reduce_scatter"),
            (dist, "batch_isend_irecv"),
        ):
            patch.setattr(module, name, counted(name, getattr(module, name)))
        out = model(x, positions, local)
        found.append(dict(calls))
        calls.clear()
        out.sum().backward()
        found.append(dict(calls))
    return found


def checkpointed(forward):
    from torch.utils.checkpoint import checkpoint

    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


@pytest.mark.slow
def test_collectives_of_each_layer_are_those_of_the_docstrings() -> None:
    gather, scatter, send = "start_all_gather", "start_reduce_scatter", "batch_isend_irecv"
    layers, world = 2, 4
    wanted = {
        ("all_gather", False, False): [{gather: layers}, {scatter: layers}],
        ("all_gather", True, False): [{gather: layers + 1}, {scatter: layers}],
        ("all_gather", True, True): [
            {gather: layers + 1},
            {gather: layers, scatter: layers},
        ],
        ("ring", False, False): [{send: layers * (world - 1)}, {send: layers * (2 * world - 1)}],
        ("ring", True, False): [
            {gather: 1, send: layers * (world - 1)},
            {send: layers * (2 * world - 1)},
        ],
    }
    for case, counts in wanted.items():
        for found in run_on_ranks(world, collectives, *case):
            assert found == counts, case


def cut_and_joined() -> list[bool]:
    axis, found = axis_of_all(), []
    for dim, x in (
        (1, torch.randn(3, 32)),
        (-1, torch.arange(64).view(2, 32)),
        (0, torch.rand(16, 2, 3)),
    ):
        part = shard_sequence(x, axis, dim)
        found += [part.size(dim) == x.size(dim) // axis.size]
        found += [torch.equal(gather_sequence(part, axis, dim), x)]
    return found


def test_gather_is_the_inverse_of_split_and_chunks_are_balanced() -> None:
    for found in run_on_ranks(4, cut_and_joined):
        assert all(found)
    x = torch.arange(16)[None]
    cut = [
        shard_sequence(x, SimpleNamespace(rank=r, size=4, group=None)).tolist() for r in range(4)
    ]
    assert cut == [[[0, 1, 14, 15]], [[2, 3, 12, 13]], [[4, 5, 10, 11]], [[6, 7, 8, 9]]]
    alone = SimpleNamespace(rank=0, size=1, group=None)
    assert shard_sequence(x, alone) is x
    assert torch.equal(gather_sequence(x, alone), x)


def test_settings_that_cannot_work_are_rejected() -> None:
    axis = SimpleNamespace(rank=0, size=2, group=None)
    for size, near in ((30, ["28", "32"]), (3, ["4"])):
        with rejects("seq_len", size, "divides") as caught:
            shard_sequence(torch.zeros(1, size), axis)
        assert re.findall(r"\d+", caught.value.problems[0].fix) == near
    with rejects("attend", ..., "missing"):
        context_parallel(nn.Sequential(nn.Linear(2, 2)), axis)
    other = Model()
    other.layers[1].attend = lambda q, k, v, ctx: dense(q, k, v, None)
    with rejects("layers.1.attend", ..., "causal"):
        context_parallel(other, axis)
    other.layers[1].attend = SimpleNamespace(spec=SPEC(window=4, softcap=30.0))
    with rejects("layers.1.attend.softcap", 30.0, "spec") as caught:
        context_parallel(other, axis)
    assert len(caught.value.problems) == 1
    with rejects("exchange", "tree", "unknown"):
        context_parallel(Model(), axis, "tree")
    model = context_parallel(Model(), axis)
    x = torch.zeros(1, 8, M)
    for call in ((x,), (x, None, torch.zeros(1, 8))):
        with rejects("positions", ..., "missing"):
            model(*call)
    with rejects("document_ids", (1, 24), "shape"):
        model(x, torch.arange(8), torch.zeros(1, 24))


def test_the_model_stays_what_it_was() -> None:
    axis, model = SimpleNamespace(rank=0, size=2, group=object()), Model()
    keys, plain = list(model.state_dict()), [m.attend for m in model.layers]
    assert context_parallel(model, SimpleNamespace(rank=0, size=1, group=None)) is model
    assert [m.attend for m in model.layers] == plain
    assert context_parallel(model, axis) is model
    copied = copy.deepcopy(model)  # although a group cannot be copied
    assert copied.layers[0].attend is model.layers[1].attend
    assert list(copied.state_dict()) == keys
    assert isinstance(copied, Model)

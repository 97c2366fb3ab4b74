"""Packed rows and caches under context parallelism on Forge's transformer; tests/equivalence trains it there.

Shapes: B rows, S tokens, V vocabulary.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forge_core import Transformer, TransformerConfig
from forge_core.model import default_positions
from forge_parallel.axes import context_parallel, gather_sequence, shard_sequence
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

B, S, V = 2, 32, 64

# lengths of documents per row, and how many tokens at the end are pads
PACKED = ([[3, 1, 19, 9], [16, 8, 8]], (0, 5))


def ids_and_positions(packed: bool) -> tuple[Tensor | None, Tensor]:
    if not packed:
        return None, torch.arange(S).expand(B, S).contiguous()
    lengths, pads = PACKED
    ids = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths])
    for row, number in enumerate(pads):
        ids[row, S - number :] = -1
    return ids, default_positions(S, ids, ids.device)


def batch(packed: bool) -> dict[str, Tensor | None]:
    """Tokens, positions, document ids."""
    ids, positions = ids_and_positions(packed)
    tokens = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(3))
    found = {"tokens": tokens, "positions": positions, "document_ids": ids}
    return {name: x if x is None else x.to(device()) for name, x in found.items()}


def build() -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=V, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=S
    )
    return Transformer(config).to(device())


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def axis_of_all() -> SimpleNamespace:
    return SimpleNamespace(rank=dist.get_rank(), size=dist.get_world_size(), group=dist.group.WORLD)


def packed_and_not(exchange: str) -> tuple[float, float, float]:
    """Error of the logits with ids, without ids, and with positions that go on through the row."""
    axis, whole = axis_of_all(), batch(packed=True)
    plain = build()
    model = context_parallel(copy.deepcopy(plain), axis, exchange)
    tokens, positions, ids = (
        shard_sequence(whole[name], axis) for name in ("tokens", "positions", "document_ids")
    )
    on = shard_sequence(torch.arange(S, device=device()).expand(B, S), axis)
    with torch.no_grad():
        wanted = plain(whole["tokens"], whole["positions"], whole["document_ids"])
        calls = ((tokens, positions, ids), (tokens, positions), (tokens, on, ids))
        found = (error(gather_sequence(model(*call), axis), wanted) for call in calls)
        return tuple(found)


@pytest.mark.distributed
@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_F10_packing_reaches_attention_under_cp(exchange: str) -> None:
    """Rotary positions are relative inside a document, so a row's own, cut, would do as well."""
    for packed, ignored, through in run_on_ranks(4, packed_and_not, exchange):
        assert packed < 1e-5
        assert through < 1e-4
        assert ignored > 1e-2


def test_a_cache_is_attended_on_its_own_rank() -> None:
    """Generation gives every rank all tokens; nothing crosses ranks (the group here cannot)."""
    plain = build()
    axis = SimpleNamespace(rank=0, size=2, group=object())
    model = context_parallel(copy.deepcopy(plain), axis)
    tokens = batch(packed=False)["tokens"]
    with torch.no_grad():
        wanted = plain(tokens)
        cache = model.new_cache(S)
        got = [model(part, cache=cache) for part in tokens.split(8, 1)]
    assert error(torch.cat(got, 1), wanted) < 1e-5
    with rejects("positions", ..., "missing"):
        model(tokens)

"""Forge's own transformers with rows spread over ranks against one process.

Shapes: B rows, S tokens, V vocabulary.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forge_core import AttentionSpec, Transformer, TransformerConfig
from forge_core.model import default_positions
from forge_moe import MoE, MoEConfig, recompute_contexts, set_aux_scale, update_expert_bias
from forge_parallel.axes import context_parallel, cut_sequence, join_sequence
from forge_testing import device, run_on_ranks

B, S, V = 2, 32, 64
IGNORED = -100

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
    """Tokens, labels (shifted inside documents, before anything is cut), positions, document ids."""
    ids, positions = ids_and_positions(packed)
    tokens = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(3))
    labels = torch.full_like(tokens, IGNORED)
    labels[:, :-1] = tokens[:, 1:]
    if ids is not None:
        labels[:, :-1][(ids[:, 1:] != ids[:, :-1]) | (ids[:, 1:] < 0)] = IGNORED
    found = {"tokens": tokens, "labels": labels, "positions": positions, "document_ids": ids}
    return {name: x if x is None else x.to(device()) for name, x in found.items()}


def build(kind: str) -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=V,
        dim=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=S,
        qk_norm=kind == "qk_norm",
        attention=AttentionSpec(scale=0.7 if kind == "scale" else None),
    )
    if kind != "moe":
        return Transformer(config).to(device())
    scope = {"aux_scope": "sequence", "aux_loss_weight": 0.1, "z_loss_weight": 0.01}
    experts = MoEConfig(
        dim=32, hidden_dim=16, num_experts=4, top_k=2, bias_update_rate=0.1, aux="attach", **scope
    )
    return Transformer(config, feed_forward=lambda _: MoE(experts)).to(device())


def loss_of(model: Transformer, part: dict[str, Tensor | None], valid: int) -> Tensor:
    logits = model(part["tokens"], part["positions"], part["document_ids"])
    flat = logits.flatten(0, 1), part["labels"].flatten()
    return F.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum") / valid


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def axis_of_all() -> SimpleNamespace:
    return SimpleNamespace(rank=dist.get_rank(), size=dist.get_world_size(), group=dist.group.WORLD)


def experts_of(model: torch.nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def errors(kind: str, packed: bool, exchange: str, how: str) -> dict[str, float]:
    axis, whole = axis_of_all(), batch(packed)
    plain = build(kind)
    model = context_parallel(copy.deepcopy(plain), axis, exchange)
    valid = int((whole["labels"] != IGNORED).sum())
    set_aux_scale(plain, torch.tensor(0.5, device=device()))
    set_aux_scale(model, torch.tensor(0.5, device=device()))
    for layer in experts_of(model):
        layer.sequence_group = axis.group
    if how == "recomputed":
        for block in model.blocks():
            block.forward = recomputed(block.forward)
    if how == "compiled":
        for block in model.blocks():
            block.compile(backend="aot_eager")
    wanted = loss_of(plain, whole, valid)
    wanted.backward()
    part = {k: None if t is None else cut_sequence(t, axis) for k, t in whole.items()}
    loss = loss_of(model, part, valid)
    loss.backward()
    total = loss.detach()
    dist.all_reduce(total)
    found = {"loss": error(total, wanted.detach())}
    for (name, a), b in zip(model.named_parameters(), plain.parameters()):
        dist.all_reduce(a.grad)
        found[name] = error(a.grad, b.grad)
    if kind == "moe":
        update_expert_bias(plain, 0, 1, groups=())
        update_expert_bias(model, 0, 1, groups=axis.group)
        for a, b in zip(experts_of(model), experts_of(plain)):
            found["bias"] = error(a.router.expert_bias, b.router.expert_bias)
    return found


def recomputed(forward):
    def call(*args):
        return checkpoint(forward, *args, use_reentrant=False, context_fn=recompute_contexts)

    return call


CASES = [
    (2, "dense", False, "ring", "as it is"),
    (4, "dense", False, "all_gather", "as it is"),
    (4, "dense", True, "ring", "as it is"),
    (2, "qk_norm", True, "all_gather", "as it is"),
    (4, "qk_norm", True, "ring", "recomputed"),
    (2, "scale", True, "ring", "as it is"),
    (2, "scale", False, "all_gather", "as it is"),
    (2, "moe", True, "all_gather", "recomputed"),
    (4, "moe", True, "ring", "as it is"),
    (2, "moe", False, "ring", "as it is"),
    (2, "dense", True, "all_gather", "compiled"),
]


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES, ids=lambda c: " ".join(map(str, c)))
def test_rows_over_ranks_equal_one_process(case: tuple) -> None:
    world, *settings = case
    for found in run_on_ranks(world, errors, *settings):
        assert len(found) > 10
        assert max(found.values()) < 1e-5, found


def packed_and_not(exchange: str) -> tuple[float, float, float]:
    """Error of the logits with ids, without ids, and with positions that go on through the row."""
    axis, whole = axis_of_all(), batch(packed=True)
    plain = build("dense")
    model = context_parallel(copy.deepcopy(plain), axis, exchange)
    tokens, positions, ids = (
        cut_sequence(whole[name], axis) for name in ("tokens", "positions", "document_ids")
    )
    on = cut_sequence(torch.arange(S, device=device()).expand(B, S), axis)
    with torch.no_grad():
        wanted = plain(whole["tokens"], whole["positions"], whole["document_ids"])
        calls = ((tokens, positions, ids), (tokens, positions), (tokens, on, ids))
        found = (error(join_sequence(model(*call), axis), wanted) for call in calls)
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
    plain = build("dense")
    axis = SimpleNamespace(rank=0, size=2, group=object())
    model = context_parallel(copy.deepcopy(plain), axis)
    tokens = batch(packed=False)["tokens"]
    with torch.no_grad():
        wanted = plain(tokens)
        cache = model.new_cache(S)
        got = [model(part, cache=cache) for part in tokens.split(8, 1)]
    assert error(torch.cat(got, 1), wanted) < 1e-5
    with pytest.raises(ValueError, match=r"pass positions=cut_sequence\(positions, axis\)"):
        model(tokens)

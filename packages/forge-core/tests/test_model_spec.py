"""Each field of AttentionSpec against a slow dense reference in fp32: rows, packed rows, KV cache.

Bound: fp32 1e-5 of max|a - b| / max|b|.
"""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core import (
    Attention,
    AttentionSpec,
    KVCache,
    TokenContext,
    Transformer,
    TransformerConfig,
    initialize,
)
from forge_core.model.attention import LocalAttention
from forge_core.model.kv_cache import LayerCache
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

B, S, H, K, D = 2, 23, 4, 2, 8
PREFIX = 3  # ids of tokens that see the whole prefix


def prefix(ctx, queries: Tensor, keys: Tensor) -> Tensor:
    """Prefix-LM: tokens whose id is PREFIX are seen by all of their document."""
    return (keys <= queries[:, None]) | (ctx.token_ids == PREFIX)[:, None, :]


@pytest.fixture(autouse=True)
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("example_lab")
    module.prefix = prefix
    monkeypatch.setitem(sys.modules, "example_lab", module)


SPECS = {
    "plain": AttentionSpec(),
    "scale": AttentionSpec(scale=0.7),
    "window_1": AttentionSpec(window=1),
    "window_4": AttentionSpec(window=4),
    "window_5": AttentionSpec(window=5),
    "window_22": AttentionSpec(window=22),
    "window_23": AttentionSpec(window=23),
    "scale_window": AttentionSpec(scale=0.4, window=6),
    "softcap": AttentionSpec(softcap=0.5),
    "sinks": AttentionSpec(sinks=True),
    "gemma": AttentionSpec(scale=0.4, window=6, softcap=0.8),
    "gpt_oss": AttentionSpec(window=4, sinks=True),
    "prefix": AttentionSpec(scale=0.6, mask="example_lab:prefix"),
    "prefix_window": AttentionSpec(window=7, softcap=0.9, mask="example_lab:prefix"),
}
ROWS = {
    "whole": None,
    "packed": [[9, 3, 10, 1], [1, 22]],
    "alike": [[11, 12], [11, 12]],
}


def ids_of(rows: list[list[int]] | None) -> Tensor | None:
    if rows is None:
        return None
    return torch.tensor([[i % 3 for i, n in enumerate(row) for _ in range(n)] for row in rows])


def reference(q, k, v, spec: AttentionSpec, rows, ctx: TokenContext, sinks) -> Tensor:
    """Token by token, from the definition."""
    out = torch.zeros_like(q)
    shown = prefix(ctx, torch.arange(S), torch.arange(S)) if spec.mask != "causal" else None
    scale = D**-0.5 if spec.scale is None else spec.scale
    for b in range(B):
        lengths = [S] if rows is None else rows[b]
        document = [n for n, length in enumerate(lengths) for _ in range(length)]
        for i in range(S):
            seen = [
                j
                for j in range(S)
                if document[j] == document[i]
                and (j <= i if shown is None else bool(shown[b, i, j]))
                and (spec.window is None or i - j < spec.window)
            ]
            for h in range(H):
                scores = k[b, seen, h * K // H] @ q[b, i, h] * scale
                if spec.softcap is not None:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                top = scores.exp()
                total = top.sum() + (sinks[h].exp() if sinks is not None else 0)
                out[b, i, h] = (top / total) @ v[b, seen, h * K // H]
    return out


def error(got: Tensor, wanted: Tensor) -> float:
    largest = wanted.abs().max().clamp_min(1.0)  # terms of about 1 cancel with a window of 1
    return float((got - wanted).abs().max() / largest)


@pytest.mark.lane("quick")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", SPECS)
def test_forward_and_gradients_equal_the_definition(name: str, rows: str) -> None:
    spec, layout = SPECS[name], ROWS[rows]
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(B, S, heads, D, generator=generator) for heads in (H, K, K)]
    parts += [torch.randn(H, generator=generator)] if spec.sinks else []
    tokens = torch.randint(0, 5, (B, S), generator=generator)
    ctx = TokenContext(token_ids=tokens, document_ids=ids_of(layout))
    upstream = torch.randn(B, S, H, D, generator=generator)
    found = []
    for compute in (
        lambda q, k, v, sinks=None: LocalAttention(spec)(q, k, v, ctx, sinks),
        lambda q, k, v, sinks=None: reference(q, k, v, spec, layout, ctx, sinks),
    ):
        mine = [p.clone().requires_grad_() for p in parts]
        out = compute(*mine)
        out.backward(upstream)
        found.append([out.detach(), *(p.grad for p in mine)])
    for got, wanted in zip(*found, strict=True):
        assert error(got, wanted) < 1e-5


def model_of(spec: AttentionSpec) -> Transformer:
    shape = {"vocab_size": 40, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    model = Transformer(TransformerConfig(**shape, max_seq_len=64, attention=spec))
    initialize(model, 3, std=0.3)
    return model


@pytest.mark.lane("quick")
@pytest.mark.parametrize("chunks", [[1] * S, [9, 1, 4, 9], [3, 20]])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", [n for n, spec in SPECS.items() if spec.mask == "causal"])
def test_a_cache_step_by_step_equals_none(name: str, rows: str, chunks: list[int]) -> None:
    model = model_of(SPECS[name])
    tokens = torch.randint(0, 40, (B, S), generator=torch.Generator().manual_seed(0))
    ids, cache = ids_of(ROWS[rows]), KVCache(S)
    pieces = [None] * len(chunks) if ids is None else ids.split(chunks, 1)
    with torch.no_grad():
        wanted = model(tokens, document_ids=ids)
        got = [
            model(t, document_ids=i, cache=cache) for t, i in zip(tokens.split(chunks, 1), pieces)
        ]
    assert error(torch.cat(got, 1), wanted) < 1e-5


def test_every_field_changes_the_model() -> None:
    tokens = torch.randint(0, 5, (B, S), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model_of(AttentionSpec())(tokens)
        for name in ("scale", "window_4", "softcap", "sinks", "prefix"):
            assert error(model_of(SPECS[name])(tokens), plain) > 1e-3, name


def test_a_mask_of_its_own_is_rejected_with_a_cache() -> None:
    model = model_of(SPECS["prefix"])
    wanted = "attention.mask", "example_lab:prefix", "unsupported"
    with rejects(*wanted):
        model.new_cache(8)
    q, k = torch.zeros(1, 3, H, D), torch.zeros(1, 3, K, D)
    with rejects(*wanted):
        LayerCache(8).attend(q, k, k, TokenContext(), SPECS["prefix"])
    with rejects("model.attention.mask", "nowhere:at_all", "import"):
        model_of(AttentionSpec(mask="nowhere:at_all"))


@pytest.mark.parametrize("rows", ["whole", "packed"])
def test_F46_a_window_makes_no_mask_of_a_square_of_the_row(
    rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[tuple[int, ...]] = []
    real = F.scaled_dot_product_attention

    def spy(*args: Tensor, **options: object) -> Tensor:
        mask = options.get("attn_mask")
        masks.append(() if mask is None else tuple(mask.shape))
        return real(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    q, k = torch.zeros(B, S, H, D), torch.zeros(B, S, K, D)
    ctx = TokenContext(document_ids=ids_of(ROWS[rows]))
    LocalAttention(AttentionSpec(window=4))(q, k, k, ctx)
    assert masks
    assert all(shape in ((), (4, 8)) or shape[0] < 4 for shape in masks)


def test_layers_may_differ() -> None:
    config = TransformerConfig(40, dim=32, num_layers=2, num_heads=4)
    specs = [AttentionSpec(window=4), AttentionSpec()]
    model = Transformer(config, mixer=lambda layer: Attention(config, specs[layer]))
    assert [block.mixer.attend.spec for block in model.blocks()] == specs


def test_flops_of_a_window() -> None:
    def scores(spec: AttentionSpec) -> float:
        attention = Attention(TransformerConfig(8, dim=16, num_heads=2), spec)
        linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        return attention.flops_per_token(S) - sum(2.0 * m.weight.numel() for m in linears)

    assert scores(AttentionSpec()) == scores(AttentionSpec(window=S)) == 2 * 16 * S
    steps = [(i + 0.5) / 100 for i in range(100 * S)]  # tokens before a place in the row
    seen = sum(min(place, 4.0) for place in steps) / len(steps)
    assert scores(AttentionSpec(window=4)) == pytest.approx(4 * 16 * seen, rel=1e-4)

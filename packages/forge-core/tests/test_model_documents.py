"""Packed documents against a float64 dense mask, against running them apart, and with a KV cache.

Bounds: fp32 1e-5 of max|a - b| / max|b|.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core import Attention, KVCache, TokenContext, Transformer, TransformerConfig, initialize
from forge_core.model import attention_ops as ops
from forge_core.model.context import default_positions
from forge_core.model.kv_cache import LayerCache
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

ROWS = {
    "one_length": [[4, 4, 4], [4, 4, 4]],
    "mixed": [[5, 2, 4, 1], [2, 2, 8]],
    "whole_row_and_cut": [[12], [3, 9]],
    "single_tokens": [[1] * 12, [11, 1]],
    "whole_rows": [[12], [12]],
}


def ids_of(rows: list[list[int]]) -> Tensor:
    """Document ids whose values repeat across rows and come back within a row."""
    return torch.tensor([[i % 3 - 1 for i, n in enumerate(row) for _ in range(n)] for row in rows])


def error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach(), wanted.detach()
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def dense_mask(rows: list[list[int]]) -> Tensor:
    """(B, 1, S, S) bool: same segment and not later."""
    number = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in rows])
    same = number[:, :, None] == number[:, None, :]
    return (same & torch.ones(12, 12, dtype=torch.bool).tril()).unsqueeze(1)


@pytest.mark.parametrize("name", ROWS)
def test_segments_equal_dense_mask_in_float64(name: str) -> None:
    torch.manual_seed(0)
    rows = ROWS[name]
    parts = [torch.randn(2, 12, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    out = ops.attend_documents(*parts, ops.SegmentPlan.of(ids_of(rows)))
    upstream = torch.randn_like(out)
    out.backward(upstream)
    wide = [p.detach().double().requires_grad_() for p in parts]
    q, k, v = (p.transpose(1, 2) for p in wide)
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5  # (B, H, S, S)
    weights = scores.masked_fill(~dense_mask(rows), float("-inf")).softmax(-1)
    wanted = (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)
    wanted.backward(upstream.double())
    assert error(out, wanted) < 1e-5
    for got, ref in zip(parts, wide):
        assert error(got.grad, ref.grad) < 1e-5


def small(**options: object) -> Transformer:
    shape = {"vocab_size": 40, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    model = Transformer(TransformerConfig(**{**shape, "max_seq_len": 64, **options}))
    initialize(model, 3, std=0.2)
    return model


@pytest.mark.parametrize("name", ROWS)
def test_model_equals_documents_apart(name: str) -> None:
    rows, model = ROWS[name], small(qk_norm=True)
    tokens = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    logits = model(tokens, document_ids=ids_of(rows))
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weight).sum().backward()
    packed = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    apart = []
    for row, lengths in enumerate(rows):
        pieces = zip(tokens[row].split(lengths), weight[row].split(lengths))
        outs = [(model(piece[None]), w) for piece, w in pieces]
        sum((out[0] * w).sum() for out, w in outs).backward()
        apart.append(torch.cat([out[0] for out, _ in outs]))
    assert error(logits, torch.stack(apart)) < 1e-5
    for n, p in model.named_parameters():
        assert error(packed[n], p.grad) < 1e-5, n


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [5, 7], [3, 1, 1, 4, 3]])
@pytest.mark.parametrize("name", ROWS)
def test_kv_cache_equals_no_cache(name: str, chunks: list[int]) -> None:
    model = small()
    tokens = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    ids = ids_of(ROWS[name])
    cache = KVCache(12)
    with torch.no_grad():
        wanted = model(tokens, document_ids=ids)
        got = [
            model(t, document_ids=d, cache=cache)
            for t, d in zip(tokens.split(chunks, 1), ids.split(chunks, 1))
        ]
    assert cache.length == 12
    assert error(torch.cat(got, 1), wanted) < 1e-5


def test_cache_goes_on_with_the_newest_document() -> None:
    model = small()
    tokens = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[-1] * 4 + [7] * 8, [7] * 12])
    cache = KVCache(12)
    with torch.no_grad():
        wanted = model(tokens, document_ids=ids)
        first = model(tokens[:, :6], document_ids=ids[:, :6], cache=cache)
        rest = [model(t, cache=cache) for t in tokens[:, 6:].split([1, 3, 2], 1)]
    assert error(torch.cat([first, *rest], 1), wanted) < 1e-5


def test_wrong_uses_of_a_cache_are_rejected() -> None:
    model, cache = small(), KVCache(4)
    model(torch.zeros(2, 3, dtype=torch.int64), cache=cache)
    with rejects("max_length", 4, "full"):
        model(torch.zeros(2, 2, dtype=torch.int64), cache=cache)
    with rejects("k", (1, 1, 2, 8), "batch"):
        model(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
    with rejects("max_length", 0, "range"):
        KVCache(0)


def test_an_attention_layer_takes_documents_and_cache() -> None:
    torch.manual_seed(0)
    attention = Attention(TransformerConfig(8, dim=16, num_heads=2))
    x, ids = torch.randn(2, 12, 16), ids_of(ROWS["mixed"])
    with torch.no_grad():
        wanted = torch.cat(
            [
                torch.cat([attention(piece[None])[0] for piece in x[row].split(lengths)])[None]
                for row, lengths in enumerate(ROWS["mixed"])
            ]
        )
        assert error(attention(x, TokenContext(document_ids=ids)), wanted) < 1e-5
        cache = LayerCache(12)
        got = [
            attention(a, TokenContext(document_ids=i), cache)
            for a, i in zip(x.split([5, 6, 1], 1), ids.split([5, 6, 1], 1))
        ]
    assert error(torch.cat(got, 1), wanted) < 1e-5


class Bidirectional:
    """Another attention, with what it needs from the context counted."""

    def __init__(self) -> None:
        self.prepared = 0

    def prepare(self, ctx: TokenContext, x: Tensor) -> None:
        self.prepared += 1

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ctx: TokenContext) -> Tensor:
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(
            1, 2
        )


def test_attend_may_be_replaced_and_is_no_part_of_the_state() -> None:
    torch.manual_seed(0)
    attention = Attention(TransformerConfig(8, dim=16, num_heads=2))
    keys, x = list(attention.state_dict()), torch.randn(2, 6, 16)
    causal_out = attention(x)
    attention.attend = mine = Bidirectional()
    seen = attention(x)
    assert error(seen[:, 0], causal_out[:, 0]) > 1e-2  # the first token sees the others
    assert error(seen[:, -1], causal_out[:, -1]) < 1e-5  # rotation keeps relative positions
    assert mine.prepared == 1
    copied = copy.deepcopy(attention)
    assert torch.equal(copied(x), seen)
    assert list(copied.state_dict()) == keys
    with torch.no_grad():  # a cache attends by itself
        assert error(attention(x, None, LayerCache(6)), causal_out) < 1e-5
    assert mine.prepared == 1


def test_positions_restart_in_each_document() -> None:
    ids = torch.tensor([[4, 4, 4, 9, 9, 4]])
    assert default_positions(6, ids, ids.device).tolist() == [[0, 1, 2, 0, 1, 0]]
    assert default_positions(3, None, ids.device, past=5).tolist() == [[5, 6, 7]]
    went_on = default_positions(6, ids, ids.device, past=10, first=[8])
    assert went_on.tolist() == [[2, 3, 4, 0, 1, 0]]


def test_F46_no_mask_of_a_square_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    real = F.scaled_dot_product_attention

    def spy(*args: object, **kwargs: object) -> Tensor:
        masks.append(kwargs.get("attn_mask"))
        return real(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    small()(torch.zeros(2, 12, dtype=torch.int64), document_ids=ids_of(ROWS["mixed"]))
    assert masks == [None] * 2 * 5  # two layers, lengths 1, 2, 4, 5, 8


@pytest.mark.parametrize(
    ("device", "dtype", "repeated"),
    [
        ("cuda", torch.float32, True),
        ("cuda", torch.bfloat16, False),
        ("cuda", torch.float16, False),
        ("cpu", torch.float32, False),
    ],
)
def test_F117_fp32_on_cuda_repeats_shared_heads(
    device: str, dtype: torch.dtype, repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There torch shares heads in its math kernel alone, with (S, S) scores of every head."""
    calls = []
    real = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        calls.append((k.size(1), v.size(1), options["enable_gqa"]))
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(Tensor, "is_cuda", device == "cuda", raising=False)
    q, k, v = (torch.randn(2, 6, n, 8).to(dtype) for n in (4, 2, 2))
    assert ops.attend_sequences(q, k, v).shape == q.shape
    cache = LayerCache(max_length=12)
    for tokens in (slice(0, 3), slice(3, 4), slice(4, 6)):  # prompt, one token, several
        out = cache.attend(q[:, tokens], k[:, tokens], v[:, tokens], TokenContext())
        assert out.shape == q[:, tokens].shape
    assert calls == [(4, 4, False) if repeated else (2, 2, True)] * 4


def test_F117_repeated_heads_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 6, 8) for heads in (6, 2, 2))
    shared = ops.sdpa(q, k, v, is_causal=True)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    assert error(ops.sdpa(q, k, v, is_causal=True), shared) < 1e-6


def test_only_the_efficient_kernel_gets_repeated_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's refuses shared heads; the other three take them."""
    given = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: given.append(k.size(1)) or q)  # fmt: skip
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    q, k = (torch.zeros(1, heads, 2, 8, dtype=torch.bfloat16) for heads in (4, 2))
    cuda = torch.backends.cuda
    kinds = [
        cuda.enable_flash_sdp,
        cuda.enable_math_sdp,
        cuda.enable_cudnn_sdp,
        cuda.enable_mem_efficient_sdp,
    ]
    for chosen in kinds:
        for enable in kinds:
            enable(enable is chosen)
        ops.sdpa(q, k, k)
    for enable in kinds:
        enable(True)
    assert given == [2, 2, 2, 4]


def test_F122_cu_seqlens_go_to_a_device_once() -> None:
    plan = ops.SegmentPlan.of_lengths([[3, 1], [2, 2]])
    borders = plan.cu_seqlens(torch.device("cpu"))
    assert borders.tolist() == [0, 3, 4, 6, 8]
    assert plan.cu_seqlens(torch.device("cpu")) is borders


def test_plan_is_made_once_per_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = ops.SegmentPlan.of
    monkeypatch.setattr(ops.SegmentPlan, "of", lambda ids: made.append(1) or real(ids))
    small(num_layers=4)(torch.zeros(2, 12, dtype=torch.int64), document_ids=ids_of(ROWS["mixed"]))
    assert made == [1]


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": True}, {"window": 2}])
def test_attention_that_is_not_causal_takes_only_a_plain_spec(options: dict[str, object]) -> None:
    q = torch.randn(1, 4, 2, 8)
    with rejects("causal", False, "unsupported"):
        ops.attend_sequences(q, q, q, ops.AttentionSpec(**options), causal=False)  # type: ignore[arg-type]


def test_a_custom_mask_is_not_taken_for_causal() -> None:
    q = torch.randn(1, 4, 2, 8)
    with rejects("attention.mask", "lab:mask", "unsupported"):
        ops.attend_sequences(q, q, q, ops.AttentionSpec(mask="lab:mask"))

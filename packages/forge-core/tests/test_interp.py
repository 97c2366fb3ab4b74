"""Weights of attention, seen from outside, against softmax token by token. Bound: fp32 1e-5."""

import pytest
import torch
from torch import nn

from forge_core import AttentionSpec, KVCache, TokenContext, Transformer, TransformerConfig
from forge_core.interp import attention_weights
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

SIZES = dict(vocab_size=64, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, init_std=0.3)
TOKENS = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(0))
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [-1] * 2])


class Keeping:
    """An `attend` that keeps what it is given."""

    def __init__(self, attend) -> None:
        self.attend, self.given = attend, None

    def __call__(self, q, k, v, *rest):
        self.given = q, k, rest[1:]
        return self.attend(q, k, v, *rest)


def slow(q, k, spec: AttentionSpec, sinks, documents) -> torch.Tensor:
    """Each weight by itself; q (S, H, D), k (S, K, D)."""
    size, heads = q.shape[:2]
    out = torch.zeros(heads, size, size)
    for h in range(heads):
        for s in range(size):
            reach = [t for t in range(s + 1) if spec.window is None or s - t < spec.window]
            reach = [t for t in reach if documents is None or documents[t] == documents[s]]
            scores = torch.stack([q[s, h] @ k[t, h // 2] for t in reach]) * (spec.scale or 0.5)
            if spec.softcap:
                scores = spec.softcap * (scores / spec.softcap).tanh()
            parts = scores.exp()
            below = parts.sum() + (0 if sinks is None else sinks[h].exp())
            out[h, s, reach] = parts / below
    return out


SPECS = {
    "plain": AttentionSpec(),
    "window": AttentionSpec(window=3, scale=0.8),
    "softcap": AttentionSpec(softcap=1.5),
    "sinks": AttentionSpec(sinks=True),
}


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["rows", "documents"])
@pytest.mark.parametrize("name", SPECS)
def test_weights_are_those_of_softmax_token_by_token(name, documents):
    model = Transformer(TransformerConfig(**SIZES, attention=SPECS[name]))
    if SPECS[name].sinks:
        nn.init.normal_(model.layers["1"].mixer.sinks)
    wanted = model(TOKENS, document_ids=documents)
    keeping = model.layers["1"].mixer.attend = Keeping(model.layers["1"].mixer.attend)
    keeping.weights = keeping.attend.weights
    with attention_weights(model) as weights:
        out = model(TOKENS, document_ids=documents)
    assert torch.equal(out, wanted)
    assert list(weights) == ["layers.0.mixer", "layers.1.mixer"]
    q, k, sinks = keeping.given
    for row in range(2):
        each = slow(
            q[row],
            k[row],
            SPECS[name],
            *(sinks or (None,)),
            None if documents is None else documents[row],
        )
        torch.testing.assert_close(weights["layers.1.mixer"][row], each, rtol=1e-5, atol=1e-6)


def test_everything_is_as_before_afterwards():
    model = Transformer(TransformerConfig(**SIZES))
    before = [model.layers[i].mixer.attend for i in "01"]
    with pytest.raises(RuntimeError, match="stop"), attention_weights(model) as weights:
        raise RuntimeError("stop")
    assert [model.layers[i].mixer.attend for i in "01"] == before
    model(TOKENS)
    assert not weights


def test_gradients_pass_and_weights_have_none():
    model = Transformer(TransformerConfig(**SIZES))
    with attention_weights(model) as weights:
        model(TOKENS).sum().backward()
    assert model.layers["0"].mixer.q_proj.weight.grad.abs().sum() > 0
    assert not any(w.requires_grad for w in weights.values())


def test_calls_with_a_cache_leave_no_weights():
    model = Transformer(TransformerConfig(**SIZES))
    with attention_weights(model) as weights:
        model(TOKENS, cache=KVCache(16))
    assert not weights


def test_an_attention_that_cannot_be_looked_into_is_named():
    model = Transformer(TransformerConfig(**SIZES))
    model.layers["1"].mixer.attend = lambda q, k, v, ctx: q
    first = model.layers["0"].mixer.attend
    with (
        rejects("layers.1.mixer.attend", ..., "unsupported", where="function"),
        attention_weights(model),
    ):
        pass
    assert model.layers["0"].mixer.attend is first
    with rejects("mask", ..., "weights", where="object"):
        first.softmax(torch.zeros(1, 4, 2, 2), TokenContext(mask=object()))
    with rejects("mask", ..., "unsupported", where="function"):
        model.layers["1"].mixer.prepare(TokenContext(mask=object()), torch.zeros(1, 2, 16))
    with (
        rejects("model", ..., "missing", where="Linear"),
        attention_weights(nn.Linear(2, 2)),
    ):
        pass

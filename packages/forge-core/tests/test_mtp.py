"""Multi-token prediction is the paper's equations, document by document, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core import Transformer, TransformerConfig, generate, initialize
from forge_core.model import MTPConfig, MuPConfig
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

K, S, IGNORED = 2, 12, -100


def _model(**options: Any) -> Transformer:
    shape = {"vocab_size": 31, "dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    model = Transformer(TransformerConfig(**shape, mtp=MTPConfig(K), **options))
    initialize(model, 1, std=0.2)
    return model.double()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def by_the_paper(model: Transformer, document: Tensor) -> list[list[Tensor]]:
    """Of each depth k the log-probabilities (S - k, V) of one document, in the paper's order of steps.

    h^k_i = TRM_k(M_k [RMSNorm(h^(k-1)_i); RMSNorm(Emb(t_(i+k)))]) for i up to S - k; P^k of h^k_i is of t_(i+k+1).
    """
    table = model.embedding.weight
    ctx = model.context(document[None])
    h = table[document][None]
    for block in model.blocks():
        h = block(h, ctx)
    head = model.lm_head.weight if hasattr(model.lm_head, "weight") else table
    head = head * model.config.scales.logits
    found = [F.log_softmax(_norm(h, model.norm.weight) @ head.T, -1)[0]]
    for k in range(1, K + 1):
        module = model.mtp[str(k - 1)]
        rows = []
        for i in range(len(document) - k):
            joined = torch.cat(
                [
                    _norm(h[0, i], module.stream_norm.weight),
                    _norm(table[document[i + k]], module.token_norm.weight),
                ]
            )
            rows.append(module.join.weight @ joined)
        inner = torch.stack(rows)[None]  # (1, S - k, D)
        h = module.block(inner, model.context(document[None, : inner.size(1)]))
        found.append(F.log_softmax(_norm(h, module.norm.weight) @ head.T, -1)[0])
    return found


def ahead_of(tokens: Tensor) -> Tensor:
    """(B, S) -> (B, K, S): the tokens 1 to K ahead, 0 where there is none."""
    return torch.stack([F.pad(tokens[:, k:], (0, k)) for k in range(1, K + 1)], dim=1)


MUP = {"parametrization": "mup", "mup": MuPConfig(8, 1)}


@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": True, "qk_norm": True}, MUP, {**MUP, "tie_embeddings": True}]
)
def test_it_equals_the_equations_in_packed_rows_too(options: dict[str, Any]) -> None:
    model = _model(**options)
    documents = [[(0, 5), (5, 12)], [(0, 12)]]
    tokens = torch.randint(31, (2, S), generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    logits = model(tokens, document_ids=ids, next_tokens=ahead_of(tokens))
    assert logits.shape == (3 * 2, S, 31)
    found = F.log_softmax(logits, -1).unflatten(0, (3, 2))
    for row, spans in enumerate(documents):
        for start, stop in spans:
            wanted = by_the_paper(model, tokens[row, start:stop])
            for k, value in enumerate(wanted):
                mine = found[k, row, start : stop - k]
                assert (mine - value).abs().max() < 1e-6, (row, start, k)


def test_without_mtp_no_module_of_it_runs() -> None:
    model = _model()
    plain = Transformer(TransformerConfig(**{**vars(model.config), "mtp": MTPConfig()})).double()
    state = {n: t for n, t in model.state_dict().items() if not n.startswith("mtp.")}
    plain.load_state_dict(state)
    tokens = torch.randint(31, (2, S), generator=torch.Generator().manual_seed(0))
    calls: list[int] = []
    for module in model.mtp.values():
        module.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(model(tokens), plain(tokens))
    assert generate(model, tokens, 3).shape == (2, 3)
    assert not calls
    assert model.flops_per_token(S) > 1.5 * plain.flops_per_token(S)


def test_a_loss_inside_the_head_sees_the_same_rows() -> None:
    model = _model()
    tokens = torch.randint(31, (2, S), generator=torch.Generator().manual_seed(0))
    whole = model(tokens, next_tokens=ahead_of(tokens))
    seen = model(tokens, next_tokens=ahead_of(tokens), loss=lambda x, weight: x @ weight.T)
    assert (whole - seen).abs().max() < 1e-12


def test_mismatched_inputs_are_rejected() -> None:
    model = _model()
    tokens = torch.zeros(1, S, dtype=torch.int64)
    with rejects("next_tokens", (1, 1, 12), "shape"):
        model(tokens, next_tokens=ahead_of(tokens)[:, :1])
    with rejects("num_modules", -1, "range"):
        MTPConfig(-1)
    with rejects("weight", 0.0, "range"):
        MTPConfig(1, 0.0)

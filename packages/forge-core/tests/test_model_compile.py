"""Compiled blocks: one graph for whole rows, no new graph for new document lengths."""

import pytest
import torch
from torch import Tensor

from forge_core import RMSNorm, Transformer, TransformerConfig, cross_entropy
from forge_core._torch_compat import not_compiled
from forge_core.model.attention_ops import SegmentPlan, attend_documents
from forge_core.model.rope import inverse_frequencies, rope_tables, rotate

pytestmark = pytest.mark.lane("test")


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_new_document_lengths_make_no_new_graph(fresh_compiler: None) -> None:
    from torch._dynamo.utils import counters

    model = Transformer(TransformerConfig(16, dim=16, num_layers=2, num_heads=2))
    tokens = torch.arange(24).view(2, 12) % 16
    batches = [
        torch.tensor([[0] * a + [1] * (12 - a), [0] * b + [3] * (12 - b)])
        for a, b in ((5, 12), (4, 2), (6, 2), (11, 7))
    ]
    with torch.no_grad():
        wanted = [model(tokens, document_ids=ids) for ids in (None, *batches)]
    for block in model.blocks():
        block.compile(backend="eager")
    counters.clear()
    graphs = []
    for ids, reference in zip((None, *batches), wanted):
        out = model(tokens, document_ids=ids)
        out.sum().backward()
        assert (out - reference).abs().max() < 1e-5 * reference.abs().max()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == 1
    assert graphs[1:] == [graphs[1]] * 4


def test_a_mark_unknown_to_the_compiler_is_rejected(
    fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.compiler, "disable", lambda function: function
    )  # torch's name changed
    with pytest.raises(AttributeError, match="_torchdynamo_disable"):
        not_compiled(lambda: 1)()


def _rotated(x: Tensor) -> Tensor:
    tables = rope_tables(torch.arange(x.size(1))[None], inverse_frequencies(8, 1e4, None))
    return rotate(x, tables)


def _normed(x: Tensor) -> Tensor:
    return _NORM(x)


def _lost(x: Tensor) -> Tensor:
    return cross_entropy(x, _LABELS).sum


def _within_documents(x: Tensor) -> Tensor:
    return attend_documents(x, x * 0.5, x + 1, _PLAN)


_NORM = RMSNorm(8)
_LABELS = torch.arange(2 * 6 * 3).view(2, 6, 3) % 8
_PLAN = SegmentPlan.of_lengths([[4, 2], [1, 5]])


@pytest.mark.lane("quick")
@pytest.mark.parametrize("function", [_rotated, _normed, _lost, _within_documents])
def test_F123_compiled_gradients_are_those_of_eager(function, fresh_compiler: None) -> None:
    """Each custom autograd function, behind a layer so that its input is not a leaf."""
    torch.manual_seed(0)
    weight = torch.eye(8).requires_grad_()
    x = torch.randn(2, 6, 3, 8)  # (B, S, H, D)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        out = function(x @ weight)
        return (out * torch.arange(1.0, 9.0)).sum() if out.dim() else out

    found = []
    for call in (run, torch.compile(run, backend="eager")):
        gradients = torch.autograd.grad(
            call(x, weight), (weight, _NORM.weight), materialize_grads=True
        )
        found.append(torch.stack([gradient.expand(8, 8) for gradient in gradients]))
    wanted, got = found
    assert wanted[0].abs().max() > 0
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()

"""Compiled blocks: one graph for whole rows, no new graph for new document lengths."""

import pytest
import torch

from forge_core import Transformer, TransformerConfig


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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

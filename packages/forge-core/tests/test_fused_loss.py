"""A loss inside the head's forward equals the loss of the logits, and never holds those of all tokens.

Bound: fp32 1e-5 of max|a - b| / max|b|.
"""

import pytest
import torch
from torch import Tensor

import forge_core
from forge_core._shared import cross_entropy as shared
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

V, B, S = 40, 2, 12


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(0))
    labels = tokens[:, 1:].clone()
    labels[0, 3:6] = -100
    return tokens[:, :-1], labels


@pytest.mark.parametrize("block", [1, 7 * V, 2**23])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_those_of_the_logits(
    tied: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_BLOCK_FUSED", block)
    model = forge_core.Transformer(
        forge_core.TransformerConfig(V, dim=32, num_layers=2, num_heads=2, tie_embeddings=tied)
    )
    forge_core.initialize(model, 1, std=0.2)
    tokens, labels = batch()
    wanted = forge_core.cross_entropy(model(tokens), labels)
    (wanted.sum / 7).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    counts = []

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        found = forge_core.fused_cross_entropy(x, weight, labels)
        counts.append(int(found.count))
        return found.sum

    total = model(tokens, loss=loss)
    (total / 7).backward()
    assert error(total.detach(), wanted.sum.detach()) < 1e-6
    assert counts == [int(wanted.count)] == [B * S - 3]
    for name, parameter in model.named_parameters():
        assert error(parameter.grad, expected[name]) < 1e-5, name


@pytest.mark.parametrize("block", [7 * V, 2**23])
def test_weights_of_labels_are_those_of_cross_entropy(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_BLOCK_FUSED", block)
    generator = torch.Generator().manual_seed(1)
    _, labels = batch()
    weights = torch.rand(B, S, generator=generator)
    weights[0, 4] = torch.nan  # of an ignored label: not read
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((B, S, 8), (V, 8)))
    found = []
    for loss in (lambda x, w: forge_core.cross_entropy(x @ w.T, labels, weights=weights),
                 lambda x, w: forge_core.fused_cross_entropy(x, w, labels, weights=weights)):  # fmt: skip
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        result = loss(*leaves)
        (result.sum / 7).backward()
        found.append((result.count, result.sum.detach(), *(leaf.grad for leaf in leaves)))
    (count, *wanted), (same, *got) = found
    assert count.dtype == same.dtype == torch.float64
    assert count == same
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < 1e-6
    with rejects("weights", (3,), "shape"):
        forge_core.fused_cross_entropy(x, weight, labels, weights=torch.ones(3))


def test_the_logits_of_all_tokens_are_never_kept() -> None:
    model = forge_core.Transformer(
        forge_core.TransformerConfig(V, dim=32, num_layers=1, num_heads=2, hidden_dim=48)
    )
    tokens, labels = batch()
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(tuple(t.shape)) or t, lambda t: t
    ):
        model(tokens, loss=lambda x, w: forge_core.fused_cross_entropy(x, w, labels).sum)
        assert not [s for s in kept if s[-1:] == (V,)]
        forge_core.cross_entropy(model(tokens), labels)
    assert (B * S, V) in kept


def test_a_loss_is_given_the_hidden_states_and_the_weight() -> None:
    model = forge_core.Transformer(
        forge_core.TransformerConfig(V, dim=32, num_layers=1, num_heads=2)
    )
    tokens, labels = batch()
    loss = forge_core.LinearCrossEntropy(z_loss=1e-2, label_smoothing=0.1)
    seen: list[Tensor] = []

    def inside(hidden: Tensor, weight: Tensor) -> Tensor:
        seen.extend((hidden, weight))
        return loss(hidden, weight, labels).sum

    hidden, inner = model.hidden(tokens), model(tokens, loss=inside)
    assert torch.equal(seen[0], hidden)
    assert torch.equal(seen[1], model.lm_head.weight)
    wanted = forge_core.cross_entropy(
        model.project(hidden), labels, z_loss=1e-2, label_smoothing=0.1
    ).sum
    assert error(inner.detach(), wanted.detach()) < 1e-6
    last = model(tokens, last_only=True)
    assert torch.equal(last, model.project(hidden[:, -1:]))
    with pytest.warns(DeprecationWarning, match="then"):
        assert torch.equal(model(tokens, then=inside), inner)


def test_a_custom_head_by_its_name_of_0_1_is_rejected() -> None:
    with rejects("Own.head", ..., "renamed"):
        type("Own", (forge_core.Transformer,), {"head": lambda self, x: x})


def test_no_label_gives_a_zero_with_a_graph_and_bf16_works() -> None:
    x = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, 8, dtype=torch.bfloat16, requires_grad=True)
    none = forge_core.fused_cross_entropy(x, weight, torch.full((5,), -100))
    none.sum.backward()
    assert (float(none.sum.detach()), int(none.count)) == (0.0, 0)
    assert float(x.grad.abs().max()) == float(weight.grad.abs().max()) == 0.0
    labels = torch.arange(5)
    found = forge_core.fused_cross_entropy(x, weight, labels).sum
    assert error(found.detach(), forge_core.cross_entropy(x @ weight.T, labels).sum.detach()) < 1e-5
    with rejects("labels", (4,), "shape", where="(5, 8)"):
        forge_core.fused_cross_entropy(x, weight, labels[:4])


def test_F197_gradients_in_bf16_sum_over_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 tokens in blocks of 8 rows, and the weight's gradient 5 rows at a time; bound: rounding of bf16."""
    monkeypatch.setattr(shared, "_TOKENS_FUSED", 8)
    monkeypatch.setattr(shared, "_BLOCK_FUSED", 5 * 8)
    monkeypatch.setattr(shared, "_BLOCK_CPU", 5 * 8)
    generator = torch.Generator().manual_seed(2)
    _, labels = batch()
    x, weight = (
        torch.randn(*shape, generator=generator).bfloat16().requires_grad_()
        for shape in ((B, S, 8), (V, 8))
    )
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
    forge_core.cross_entropy(exact[0] @ exact[1].T, labels).sum.backward()
    forge_core.fused_cross_entropy(x, weight, labels).sum.backward()
    for leaf, wanted in zip((x, weight), exact, strict=True):
        assert error(leaf.grad, wanted.grad) < 2**-6


@pytest.mark.parametrize(
    ("ids", "tokens"), [(128256, 2048), (32000, 8192), (64128, 4096), (500, 8192), (300000, 2048)]
)
def test_blocks_on_a_gpu_are_large(ids: int, tokens: int) -> None:
    """16,384 tokens and 128,256 ids: 8 blocks, of 3 matmuls each; 128 before, of 65."""
    assert shared.block_size(ids, 4096, torch.float32, torch.bfloat16, "cuda") == tokens


def test_blocks_on_a_cpu_have_room_for_the_gradient_of_the_weight() -> None:
    assert shared.block_size(128256, 512, torch.float32, torch.bfloat16, "cpu") == 1024
    assert shared.block_size(1000, 64, torch.float32, torch.float32, "cpu") == 8388
    assert shared.block_size(128256, 64, torch.float32, torch.float32, "cpu") == 256

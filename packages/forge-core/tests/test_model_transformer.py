"""The transformer as a whole: factories, refusals, roles, FLOPs, tied weights, recomputation."""

from fnmatch import fnmatchcase

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from forge_core import FeedForward, TokenContext, Transformer, TransformerConfig
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

ROLES = {
    "colwise",
    "shared_heads",
    "rowwise",
    "vocab",
    "sequence",
    "replicate_sum_grad",
    "sharded_logits",
    "expert",
    "opaque",
}
VARIANTS = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "qwen": {"qk_norm": True, "qkv_bias": True, "num_kv_heads": 2, "head_dim": 6},
    "gpt": {
        "norm": "layer_norm",
        "feed_forward": "gelu",
        "feed_forward_bias": True,
        "o_bias": True,
    },
}


def config(**options: object) -> TransformerConfig:
    shape = {"vocab_size": 40, "dim": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 16}
    return TransformerConfig(**{**shape, **options})


def some_tokens() -> Tensor:
    return torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", VARIANTS)
def test_names_and_roles(name: str) -> None:
    model = Transformer(config(**VARIANTS[name]))
    roles = model.parallel_roles()
    assert set(roles.values()) <= ROLES
    assert all(type(role) is str for role in roles.values())
    names = [n for n, _ in model.named_parameters()]
    for n in names:
        assert sum(fnmatchcase(n, pattern) for pattern in roles) == 1, n
    bare = ["lm_head"] if model.config.tie_embeddings else []
    assert all(any(fnmatchcase(n, pattern) for n in names + bare) for pattern in roles)
    assert {"embedding.weight", "norm.weight", "layers.1.mixer.o_proj.weight"} <= set(names)
    assert "layers.0.mixer_norm.weight" in names
    assert "layers.0.feed_forward_norm.weight" in names
    assert not list(model.named_buffers())


@pytest.mark.parametrize("name", VARIANTS)
def test_causal(name: str) -> None:
    """A changed token moves no earlier logits, and moves its own."""
    model, tokens = Transformer(config(**VARIANTS[name])), some_tokens()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 40
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_are_those_of_the_matmuls(name: str) -> None:
    model, tokens = Transformer(config(**VARIANTS[name])), some_tokens()
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2)
    if not model.config.tie_embeddings:
        matrices -= model.embedding.weight.numel()
    width = 4 * model.config.resolved_head_dim
    assert model.flops_per_token(12) == 2 * matrices + 2 * 2 * width * 12
    # before 2.15 torch counts nothing for attention's kernel on a CPU
    nothing = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *_, **__: 0}
    with FlopCounterMode(display=False, custom_mapping=nothing) as counter, torch.no_grad():
        model(tokens)
    assert counter.get_total_flops() == 24 * 2 * matrices


def test_tied_embedding_is_one_parameter_and_gets_both_gradients() -> None:
    model = Transformer(config(tie_embeddings=True))
    assert not list(model.lm_head.parameters())
    model(some_tokens()).square().sum().backward()
    unused = torch.ones(40, dtype=torch.bool)
    unused[some_tokens().unique()] = False
    assert unused.any()
    assert (model.embedding.weight.grad[unused] != 0).any()  # only the head reaches these rows


def test_F11_tied_embedding_stays_tied_through_materialization() -> None:
    with torch.device("meta"):
        model = Transformer(config(tie_embeddings=True))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        model.embedding.weight.fill_(0.0)
        assert not model(some_tokens()).any()


def test_factories_get_the_layer_and_the_context() -> None:
    seen: list[TokenContext] = []

    class Watch(nn.Module):
        def __init__(self, layer: int) -> None:
            super().__init__()
            self.inner = FeedForward(32, 8)
            self.layer = layer

        def forward(self, x: Tensor, ctx: TokenContext) -> Tensor:
            seen.append(ctx)
            return self.inner(x)

    class NoMixing(nn.Module):
        def forward(self, x: Tensor, ctx: TokenContext, cache: object = None) -> Tensor:
            return torch.zeros_like(x)

    model = Transformer(config(), mixer=lambda _: NoMixing(), feed_forward=Watch)
    tokens, ids = some_tokens(), torch.zeros(2, 12, dtype=torch.int64)
    model(tokens, document_ids=ids)
    assert [b.feed_forward.layer for b in model.blocks()] == [0, 1]
    assert seen[0] is seen[1]
    assert seen[0].token_ids is tokens
    assert seen[0].document_ids is ids
    assert torch.equal(seen[0].positions, torch.arange(12).expand(2, 12))
    assert model.parallel_roles()["layers.1.feed_forward.*"] == "opaque"
    head, feed_forwards = 2.0 * model.lm_head.weight.numel(), 2 * 3 * 2.0 * 32 * 8
    assert model.flops_per_token(12) == head + feed_forwards, "of Watch's linear layers (F177)"
    whole = Transformer(config(), block=lambda i: model.layers[str(i)])
    assert whole.blocks() == model.blocks()
    with rejects("block", ..., "excludes"):
        Transformer(config(), mixer=lambda _: NoMixing(), block=lambda _: NoMixing())


def test_invalid_arguments_are_rejected() -> None:
    model, tokens = Transformer(config()), some_tokens()
    with rejects("tokens", (1, 17), "length", where="max_seq_len 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))
    other = Transformer(config())
    other.layers["1"].feed_forward.needs_whole_rows = True
    with rejects("layers.1.feed_forward", ..., "needs_whole_rows"):
        other.new_cache(32)
    cache = model.new_cache(32)
    model(tokens, cache=cache)
    with rejects("tokens", (2, 5), "length", where="12"):
        model(tokens[:, :5], cache=cache)
    with rejects("document_ids", (2, 11), "shape"):
        model(tokens, document_ids=torch.zeros(2, 11, dtype=torch.int64))
    with rejects("positions", (12,), "shape"):
        model(tokens, positions=torch.arange(12))


def test_positions_are_used() -> None:
    """Rotation is relative: a common shift changes nothing, a stretch does."""
    model, tokens = Transformer(config(init_std=0.3)), some_tokens()
    base = torch.arange(12)[None]
    with torch.no_grad():
        plain, given, shifted, stretched = (
            model(tokens, positions=p) for p in (None, base, base.expand(2, 12) + 5, base * 3)
        )
    assert torch.equal(plain, given)
    assert (plain - shifted).abs().max() < 1e-4 * plain.abs().max()
    assert (plain - stretched).abs().max() > 1e-2 * plain.abs().max()


def test_last_only_is_the_last_row() -> None:
    model, tokens = Transformer(config()), some_tokens()
    with torch.no_grad():
        last, full = model(tokens, last_only=True), model(tokens)
    assert last.shape == (2, 1, 40)
    assert torch.allclose(last, full[:, -1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_blocks_give_the_same_gradients(reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, ctx: TokenContext, cache: object = None) -> Tensor:
            return checkpoint(self.inner, x, ctx, use_reentrant=reentrant)

    plain = Transformer(config())
    again = Transformer(config(), block=lambda i: Recomputed(plain.layers[str(i)]))
    ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    grads = []
    for model in (plain, again):
        again.embedding, again.norm, again.lm_head = plain.embedding, plain.norm, plain.lm_head
        plain.zero_grad()
        model(some_tokens(), document_ids=ids).square().mean().backward()
        grads.append([p.grad.clone() for p in plain.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_autocast_bf16_is_near_fp32() -> None:
    model, tokens = Transformer(config()), some_tokens()
    wanted = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        got = model(tokens)
        got.float().square().mean().backward()  # inside autocast on purpose
    assert got.dtype == torch.bfloat16
    assert (got.float() - wanted).abs().max() < 0.03 * wanted.abs().max()  # a few bf16 roundings
    low = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    wanted.square().mean().backward()
    for a, p in zip(low, model.parameters()):
        assert (a - p.grad).abs().max() < 0.1 * p.grad.abs().max()


@pytest.mark.parametrize(
    ("tokens", "value", "code"),
    [
        (torch.arange(5), (5,), "shape"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), (1, 2, 3), "shape"),
        (torch.zeros(2, 5), (2, 5), "stream"),
        (torch.zeros(2, 5, 40), (2, 5, 40), "stream"),
        (torch.ones(2, 5, dtype=torch.bool), torch.bool, "dtype"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_F114_tokens_of_another_form_are_named(
    tokens: Tensor, value: object, code: str, device: str
) -> None:
    with torch.device(device):
        model = Transformer(config(num_layers=1))
    with rejects("tokens", value, code):
        model(tokens.to(device))


@pytest.mark.slow
def test_F114_ids_and_streams_of_any_fitting_form_pass() -> None:
    model = Transformer(config(num_layers=1))
    ids = some_tokens()
    wanted = model(ids)
    assert torch.equal(model(ids.int()), wanted)
    assert torch.equal(model(model.embedding(ids)), wanted)
    torch.testing.assert_close(torch.compile(model, backend="eager")(ids), wanted)

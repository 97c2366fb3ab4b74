"""Layers of several types: each computes as a model whose own keys say the same; what is refused."""

import pytest
import torch

from forge_core import AttentionSpec, SamplingConfig, Transformer, TransformerConfig, generate
from forge_core.model import Attention, LayerType, RopeScaling
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

SHAPE = {"vocab_size": 31, "dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
LINEAR = RopeScaling(4.0, name="linear")
TYPES = {
    "local": LayerType(window=3, rope_theta=100.0, rope_scaling=False),
    "nope": LayerType(rope=False),
}
#: The same, as keys of a whole model.
OWN = {
    "global": {"rope_scaling": LINEAR},
    "local": {"attention": AttentionSpec(scale=0.5, window=3), "rope_theta": 100.0},
    "nope": {"partial_rotary_factor": 0.0},
}
PATTERN = ("local", "global", "nope")


def config(**options) -> TransformerConfig:
    given = {
        "num_layers": 5,
        "layer_pattern": PATTERN,
        "layer_types": TYPES,
        "rope_scaling": LINEAR,
    }
    return TransformerConfig(**SHAPE, attention=AttentionSpec(scale=0.5), **{**given, **options})


def strong(model: Transformer) -> Transformer:
    """Weights far from those of the start, so that attention is no mean."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model.eval()


def test_each_layer_computes_what_a_model_of_its_type_does() -> None:
    model = strong(Transformer(config()))
    x = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(0))
    for layer, block in enumerate(model.blocks()):
        name = PATTERN[layer % 3]
        options = {"attention": AttentionSpec(scale=0.5), **OWN[name]}
        alone = Attention(TransformerConfig(**SHAPE, num_layers=5, **options))
        alone.load_state_dict(block.mixer.state_dict())
        assert torch.equal(block.mixer(x), alone(x)), name
        others = [Attention(config().of_layer(n)) for n in range(3) if n != layer % 3]
        for other in others:
            other.load_state_dict(block.mixer.state_dict())
            assert float((other(x) - alone(x)).detach().abs().max()) > 1e-3


def test_packed_sequences_and_a_cache_equal_full_sequences() -> None:
    model, generator = strong(Transformer(config())), torch.Generator().manual_seed(2)
    parts = [torch.randint(0, 31, (1, n), generator=generator) for n in (7, 12)]
    ids = torch.tensor([[0] * 7 + [1] * 12])
    with torch.no_grad():
        packed = model(torch.cat(parts, 1), document_ids=ids)
        apart = torch.cat([model(part) for part in parts], 1)
        assert float((packed - apart).abs().max() / apart.abs().max()) < 1e-5
        cache = model.new_cache(12)
        steps = [model(parts[1][:, n : n + 1], cache=cache) for n in range(12)]
        stepped = torch.cat(steps, 1)
        assert float((stepped - apart[:, 7:]).abs().max() / apart.abs().max()) < 1e-5
    greedy = SamplingConfig(temperature=0.0)
    new = generate(model, parts[0], 8, greedy)
    rows = parts[0]
    for _ in range(8):
        rows = torch.cat((rows, model(rows)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(new, rows[:, 7:])


def test_the_config_of_a_layer_is_that_of_its_type() -> None:
    whole = config()
    assert whole.of_layer(0) == whole.of_layer(3)
    assert whole.of_layer(0).attention == AttentionSpec(scale=0.5, window=3)
    assert whole.of_layer(1).rope_scaling == LINEAR
    assert whole.of_layer(2).rotary_dim == 0
    plain = TransformerConfig(**SHAPE)
    assert plain.of_layer(1) is plain
    assert hash(whole) == hash(config())


def test_flops_of_local_layers_are_fewer() -> None:
    flops = [block.mixer.flops_per_token(64) for block in Transformer(config()).blocks()]
    assert flops[0] == flops[3] < flops[1] == flops[2]


@pytest.mark.parametrize(
    ("options", "key", "value", "code"),
    [
        ({"layer_pattern": ("locl", "nope")}, "layer_pattern", "locl", "unknown"),
        ({"layer_pattern": ("nope",)}, "layer_types.local", ..., "unused"),
        ({"layer_pattern": ()}, "layer_types.nope", ..., "unused"),
        ({"layer_pattern": ["nope", "local"]}, "layer_pattern", ["nope", "local"], "type"),
        ({"num_layers": 2}, "layer_pattern", PATTERN, "length"),
        (
            {"layer_types": {**TYPES, "global": TYPES["nope"]}},
            *("layer_types.global", ..., "reserved"),
        ),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor", 0.0, "excludes"),
    ],
)
def test_a_pattern_without_an_effect_is_rejected(
    options: dict, key: str, value: object, code: str
) -> None:
    with rejects(key, value, code, where="model: "):
        config(**options)


@pytest.mark.parametrize(
    ("options", "key", "value", "code"),
    [
        ({}, "", ..., "missing"),
        ({"window": 0}, "window", 0, "range"),
        ({"rope_theta": 1.0}, "rope_theta", 1.0, "range"),
        ({"rope": 1}, "rope", 1, "type"),
        ({"rope": False, "rope_theta": 5.0}, "rope", False, "excludes"),
    ],
)
def test_a_type_is_checked(options: dict, key: str, value: object, code: str) -> None:
    with rejects(key, value, code, where="layer_types: "):
        LayerType(**options)


def test_an_attention_is_of_one_layer() -> None:
    with rejects("layer_pattern", PATTERN, "several"):
        Attention(config())

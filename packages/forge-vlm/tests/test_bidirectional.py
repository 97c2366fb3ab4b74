"""Tokens of images, or of a prefix, that see those behind them too."""

import pytest
import torch
from tiny_rows import IMAGE, rows

from forge_core import SamplingConfig, Transformer, generate, initialize
from forge_core.model import AttentionSpec
from forge_testing.problems import rejects
from forge_vlm import VLM, FusionConfig, ModalityConfig, SequencePlan, VisionConfig, VLMConfig
from forge_vlm.fusion import MoMaConfig
from forge_vlm.vision import ViTConfig

pytestmark = pytest.mark.lane("test")

SIZES = dict(vocab_size=64, dim=16, num_layers=2, num_heads=2, max_seq_len=32)


def build(name, fusion=None, **options):
    vit = ViTConfig(image_size=8, patch_size=4, dim=8, num_layers=1, num_heads=2)
    model = VLM(
        VLMConfig(
            **SIZES | options,
            vision=VisionConfig(vit=vit),
            modalities={"image": ModalityConfig(IMAGE)},
            fusion=fusion or FusionConfig(),
            bidirectional=name,
        )
    )
    initialize(model, 0, std=0.3, residual_std=0.3)
    return model.eval()


def plan(tokens, clips=None):
    return SequencePlan.of(tokens, None, {IMAGE: 1}, [[(1, 2, 2)], [(1, 2, 2)] * 2], clips=clips)


def labels(tokens):
    found = torch.full_like(tokens, -100)
    found[:, 11:13] = tokens[:, 12:]
    return found


def reaches(model, tokens, images, spans):
    """(B, S, S): whether the first token of a pair is moved by the embedding of the second."""
    stream = []

    def keep(x):
        stream.append(x.detach().requires_grad_())
        return stream[0]

    given = {} if spans is None else {model.config.span_input: spans}
    logits = model(
        tokens,
        images=images,
        after_embedding=lambda x: keep(x) if x.is_floating_point() else x,
        **given,
    )
    found = []
    for i in range(tokens.size(1)):
        (grad,) = torch.autograd.grad(logits[:, i].pow(2).sum(), stream[0], retain_graph=True)
        found.append(grad.abs().amax(-1) > 0)
    return torch.stack(found, 1)


@pytest.mark.parametrize("name", ["image", "clip", "document", "prefix_lm"])
def test_one_layer_attends_to_what_the_plan_allows(name):
    model, (tokens, images) = build(name, num_layers=1), rows(14)
    own = plan(tokens, [[0], [0, 0]])
    found = reaches(model, tokens, images, own.spans(name, labels(tokens)))
    assert torch.equal(found, own.visible(name, labels(tokens)))


@pytest.mark.parametrize("name", ["image", "document"])
def test_tokens_and_images_mark_bidirectional_spans(name):
    model, (tokens, images) = build(name), rows(14)
    wanted = model(tokens, images=images, **{model.config.span_input: plan(tokens).spans(name)})
    assert torch.equal(model(tokens, images=images), wanted)
    assert not torch.allclose(build("none")(tokens, images=images), wanted, atol=1e-3)


def test_without_images_the_logits_are_those_of_the_text_model():
    model, (tokens, _) = build("image"), rows(14)
    text = Transformer(model.config)
    text.load_state_dict({n: v for n, v in model.state_dict().items() if n in text.state_dict()})
    tokens = tokens.clamp(max=60)
    assert torch.equal(model(tokens), text(tokens))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("image", {}),
        ("document", {"mixer": "mla"}),
        ("prefix_lm", {"attention": AttentionSpec(window=9)}),
        ("image", {"fusion": FusionConfig("mixture_of_transformers")}),
        ("document", {"fusion": FusionConfig("moma", moma=MoMaConfig())}),
    ],
    ids=str,
)
def test_generation_equals_a_full_forward(name, options):
    """Uneven rows, padded at the left: a prefill that sees ahead, then causal steps."""
    model, (tokens, images) = build(name, **options), rows(14)
    with torch.no_grad():  # no new token is a placeholder: the first of equal ones is taken
        model.lm_head.weight[IMAGE] = model.lm_head.weight[1]
    prompts, calls = [tokens[0, :8], tokens[1]], []
    model.vision.register_forward_hook(lambda *a: calls.append(1))
    new = generate(model, prompts, 6, SamplingConfig(temperature=0.0), extras={"images": images})
    assert len(calls) == 1
    for row, own in ((0, images[:1]), (1, images[1:])):
        whole, prefix = prompts[row], len(prompts[row])
        for step in range(6):
            given = {}
            if name == "prefix_lm":
                ids = torch.full((1, len(whole)), -1)
                ids[:, :prefix] = 0
                given = {"prefix_ids": ids}
            with torch.no_grad():
                logits = model(whole[None], images=own, **given)[0, -1]
            assert logits.argmax() == new[row, step]
            whole = torch.cat([whole, new[row, step : step + 1]])


def test_models_that_cannot_be_bidirectional_are_rejected():
    model, (tokens, images) = build("prefix_lm"), rows(14)
    with rejects("prefix_ids", ..., "missing"):
        model(tokens, images=images)
    with rejects("bidirectional", "prefix_lm", "cache"):
        generate(model, tokens[:, :1].repeat(1, 8), 2, prefill_chunk=4)
    model = build("image")
    cache = model.new_cache(32)
    with torch.no_grad():
        model(tokens[:1, :1], cache=cache)
        with rejects("bidirectional", "image", "cache"):
            model(tokens[:1], images=images[:1], cache=cache)
    with rejects("clip_ids", ..., "missing"):
        build("clip")(tokens, images=images)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"bidirectional": "images"}, "unknown"),
        ({"fusion": FusionConfig("cross_attention")}, "cross_attention"),
        (
            {
                "vision": VisionConfig("none"),
                "modalities": {"image": ModalityConfig(40, 8, discrete=True)},
                "fusion": FusionConfig("mixture_of_transformers"),
            },
            "discrete",
        ),
        ({"mixer": "mine:mixer"}, "mixer"),
        ({"attention": AttentionSpec(mask="mine:mask")}, "excludes"),
    ],
)
def test_a_configuration_that_cannot_be_is_rejected(options, code):
    given = {"modalities": {"image": ModalityConfig(IMAGE)}, "bidirectional": "image", **options}
    with rejects("bidirectional", given["bidirectional"], code):
        VLMConfig(**{**SIZES, **given})

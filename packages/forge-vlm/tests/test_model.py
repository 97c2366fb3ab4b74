"""The joint decoder: features of images are tokens of the stream."""

import pytest
import torch
from tiny_rows import IMAGE, rows

from forge_core import SamplingConfig, Transformer, generate
from forge_core.model import MTPConfig
from forge_testing.problems import rejects
from forge_vlm import VLM, ModalityConfig, VisionConfig, VLMConfig
from forge_vlm.vision import ViTConfig

pytestmark = pytest.mark.lane("test")

SIZES = dict(vocab_size=64, dim=16, num_layers=2, num_heads=2, max_seq_len=32)


def config(**options):
    vit = ViTConfig(image_size=8, patch_size=4, dim=8, num_layers=1, num_heads=2)
    return VLMConfig(
        **SIZES,
        vision=VisionConfig(vit=vit),
        modalities={"image": ModalityConfig(first_id=IMAGE)},
        **options,
    )


def test_without_images_the_logits_are_those_of_the_text_model():
    model, text = VLM.from_config(config()), Transformer(config())
    text.load_state_dict({n: v for n, v in model.state_dict().items() if n in text.state_dict()})
    tokens = torch.randint(1, 60, (2, 12))
    wanted = text(tokens)
    assert torch.equal(model(tokens), wanted)
    out = model(tokens, images=torch.zeros(0, 3, 8, 8))
    assert torch.equal(out, wanted)
    out.sum().backward()  # the encoder ran: its gradients are there, and zero
    assert all(float(p.grad.abs().max()) == 0.0 for p in model.vision.parameters())


def test_an_image_changes_later_tokens_and_none_before():
    model, (tokens, images) = VLM(config()).eval(), rows(12)
    before, after = model(tokens, images=images), model(tokens, images=images.flip(-1))
    moved = (before - after).abs().amax(-1) > 0
    assert not moved[:, :1].any()
    assert not moved[0, 1]
    assert moved[0, 6:].all()
    assert moved[1, 5:].all()


def test_rows_take_their_images_in_order():
    """Each row alone with its images gives what the batch gives."""
    model, (tokens, images) = VLM(config()).eval(), rows(12)
    both = model(tokens, images=images)
    for row, own in ((0, images[:1]), (1, images[1:])):
        alone = model(tokens[row : row + 1], images=own)
        torch.testing.assert_close(alone, both[row : row + 1], rtol=1e-5, atol=1e-6)


def test_bytes_of_images_are_normalized():
    model, (tokens, _) = VLM(config()).eval(), rows(12)
    images = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    wanted = model(tokens, images=(images.float() / 255 - 0.5) / 0.5)
    torch.testing.assert_close(model(tokens, images=images), wanted, rtol=1e-5, atol=1e-6)


def test_another_number_of_tokens_than_placeholders_is_rejected():
    model, (tokens, images) = VLM(config()), rows(12)
    with rejects("media", 8, "number"):
        model(tokens, images=images[:2])
    with rejects("media", 0, "number"):
        model(tokens, images=images[:0])


def test_generation_encodes_once_and_equals_a_full_forward():
    model, (tokens, images) = VLM(config()).eval(), rows(12)
    with (
        torch.no_grad()
    ):  # no new token is a placeholder, which would want an image in the whole forward
        model.lm_head.weight[IMAGE] = -10 * model.lm_head.weight.mean(0)
    calls = []
    model.vision.register_forward_hook(lambda *a: calls.append(1))
    prompts = [tokens[0, :8], tokens[1]]
    new = generate(model, prompts, 6, SamplingConfig(temperature=0.0), extras={"images": images})
    assert len(calls) == 1
    for row, own in ((0, images[:1]), (1, images[1:])):
        whole = prompts[row]
        for step in range(6):
            with torch.no_grad():
                chosen = model(whole[None], images=own)[0, -1].argmax()
            assert chosen == new[row, step]
            whole = torch.cat([whole, chosen[None]])


def test_a_frozen_encoder_stays_in_eval_mode_and_keeps_no_activations():
    model, (tokens, images) = VLM(config()), rows(12)
    model.vision.requires_grad_(False)
    model.train()
    assert model.training
    assert not model.vision.training
    model(tokens, images=images).sum().backward()
    assert all(p.grad is None for p in model.vision.parameters())
    assert all(p.grad is not None for p in model.adapter.parameters())


@pytest.mark.parametrize(
    ("options", "key", "value", "code"),
    [
        ({"positions": "mrope"}, "positions", "mrope", "mrope"),
        ({"positions": "random"}, "positions", "random", "unknown"),
        ({"modalities": {}}, "modalities", {}, "no_placeholder"),
        ({"modalities": {"image": ModalityConfig()}}, "modalities.image.first_id", 0, "padding"),
        ({"modalities": {"image": ModalityConfig(64)}}, "modalities.image.first_id", 64, "range"),
        (
            {"modalities": {"a": ModalityConfig(3, 4, True), "b": ModalityConfig(5)}},
            *("modalities.a", ..., "duplicate"),
        ),
        ({"images_per_row": -1}, "images_per_row", -1, "range"),
        ({"mtp": MTPConfig(num_modules=1)}, "mtp.num_modules", 1, "excludes"),
    ],
)
def test_impossible_arguments_are_rejected(options, key, value, code):
    with rejects(key, value, code):
        VLMConfig(**{**SIZES, "modalities": {"image": ModalityConfig(IMAGE)}, **options})


@pytest.mark.parametrize(
    ("options", "key", "code"),
    [
        ({"first_id": -1}, "first_id", "range"),
        ({"num_ids": 0}, "num_ids", "size"),
        ({"num_ids": 2}, "num_ids", "placeholder"),
    ],
)
def test_ids_that_cannot_be_are_rejected(options, key, code):
    with rejects(key, options[key], code):
        ModalityConfig(**options)

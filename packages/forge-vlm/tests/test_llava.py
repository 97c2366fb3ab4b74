"""LLaVA of transformers, from the same weights: logits, training, folders both ways."""

import dataclasses
import json

import pytest
import torch
from hf_folders import assert_same_logits, assert_trains_alike, ours_of, renamed, saved

from forge_testing.problems import rejects
from forge_vlm.families import LLAVA
from forge_vlm.vision import VisionConfig

pytestmark = pytest.mark.lane("test")

transformers = pytest.importorskip("transformers")
VISION = {
    "clip_vision_model": dict(projection_dim=32),
    "siglip_vision_model": {},
}
IMAGE = 127


def theirs_of(kind="clip_vision_model", text="llama", layer=-2, strategy="default"):
    torch.manual_seed(0)
    sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    encoder = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
    config = transformers.LlavaConfig(
        vision_config=dict(encoder, model_type=kind, image_size=16, patch_size=8, **VISION[kind]),
        text_config=dict(sizes, **heads, model_type=text),
        image_token_id=IMAGE,
        vision_feature_layer=layer,
        vision_feature_select_strategy=strategy,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    return model


def batch(places=4, images=3):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 120, (2, 14), generator=generator)
    tokens[0, 2 : 2 + places] = IMAGE
    if images == 3:
        tokens[1, 1 : 1 + places] = tokens[1, 7 : 7 + places] = IMAGE
    return tokens, torch.randn(images, 3, 16, 16, generator=generator)


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({}, 4),
        ({"strategy": "full"}, 5),
        ({"layer": [-1, -3]}, 4),
        ({"kind": "siglip_vision_model", "layer": -1, "strategy": "full"}, 4),
        ({"text": "qwen2"}, 4),
        ({"text": "mistral"}, 4),
    ],
)
def test_logits_are_those_of_transformers(options, places, tmp_path):
    theirs = theirs_of(**options).eval()
    ours, (tokens, images) = ours_of(theirs, tmp_path, LLAVA).eval(), batch(places)
    assert_same_logits(ours, theirs, tokens, images)


@pytest.mark.slow
def test_twenty_steps_are_those_of_transformers(tmp_path):
    theirs, (tokens, images) = theirs_of(), batch()
    media = {"images": images}, {"pixel_values": images}
    assert_trains_alike(ours_of(theirs, tmp_path, LLAVA), theirs, tokens, IMAGE, *media)


@pytest.mark.parametrize(
    "options", [{}, {"kind": "siglip_vision_model", "layer": -1, "strategy": "full"}]
)
def test_a_written_folder_opens_in_transformers(options, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    theirs = theirs_of(**options).eval()
    ours = ours_of(theirs, tmp_path / "theirs", LLAVA).eval()
    folder = tmp_path / "ours"
    folder.mkdir()
    rows = LLAVA.rows_of(ours.config)
    tensors = renamed(rows, ours.state_dict(), ours.config.num_layers, back=True)
    safetensors.save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(LLAVA.config_to_hf(ours.config)))
    opened, info = transformers.LlavaForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    tokens, images = batch(4)
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, pixel_values=images).logits
        assert torch.equal(opened.eval()(input_ids=tokens, pixel_values=images).logits, wanted)


def test_keys_that_change_the_function_are_rejected(tmp_path):
    hf, _ = saved(theirs_of(), tmp_path)
    own, text = "vision_feature_select_strategy", {"model_type": "opt"}
    for change, key, value, code in (
        ({"projector_hidden_act": "relu"}, "projector_hidden_act", "relu", "unsupported"),
        ({own: "x"}, own, "x", "unknown"),
        ({"image_newline": 3}, "image_newline", 3, "unknown_key"),
        ({"text_config": None}, "text_config", ..., "type"),
        ({"text_config": text}, "text_config.model_type", "opt", None),
    ):
        with rejects(key, value, code, where="llava"):
            LLAVA.config_from_hf({**hf, **change})


def test_a_model_without_a_hidden_state_is_not_written(tmp_path):
    hf, _ = saved(theirs_of(), tmp_path)
    config = LLAVA.config_from_hf(hf)
    vision = dataclasses.replace(config.vision, select_layer=())
    with rejects("vision.select_layer", (), "missing", where="llava"):
        LLAVA.config_to_hf(dataclasses.replace(config, vision=vision))


def test_an_older_file_has_defaults_of_its_decoder(tmp_path):
    """llava-1.5-7b names five keys of its decoder; the others are those of Llama 1."""
    hf, _ = saved(theirs_of(), tmp_path)
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    config = LLAVA.config_from_hf({**hf, "text_config": text, "image_token_index": 32000})
    assert (config.dim, config.num_layers, config.hidden_dim) == (4096, 32, 11008)
    assert config.vision.pixels[0][0] == pytest.approx(0.48145466)


@pytest.mark.parametrize("kind", ["clip", "siglip", "siglip2", "idefics3", "smolvlm", "vit"])
def test_F73_pixels_are_normalized_as_the_encoder_was_trained(kind):
    model_type = {"vit": "vit"}.get(kind, f"{kind}_vision" + "_model" * (kind[-1] in "p2"))
    theirs = transformers.models.auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES[kind]
    processor = getattr(transformers, theirs["pil"])
    vision = VisionConfig("transformers", transformers={"model_type": model_type})
    wanted = (tuple(processor.image_mean), tuple(processor.image_std))
    assert vision.pixels == wanted
    other = dataclasses.replace(
        VisionConfig(), name="transformers", transformers=vision.transformers
    )
    assert other.pixels == wanted
    given = VisionConfig(**vars(vision) | {"mean": (0.1, 0.2, 0.3)})
    assert given.pixels == ((0.1, 0.2, 0.3), wanted[1])


def test_F73_an_unknown_encoder_needs_its_mean():
    with rejects("mean", ..., "missing"):
        VisionConfig("transformers", transformers={"model_type": "blip_vision_model"})
    own = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}
    VisionConfig("transformers", transformers={"model_type": "blip_vision_model"}, **own)

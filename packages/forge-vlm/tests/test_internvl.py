"""InternVL of transformers, from the same weights: logits, training, folders both ways."""

import dataclasses
import json

import pytest
import torch
from hf_folders import assert_same_logits, assert_trains_alike, ours_of, renamed

from forge_core import initialize
from forge_testing.problems import rejects
from forge_vlm import VisionConfig
from forge_vlm.families import INTERNVL
from forge_vlm.vision import build_encoder

pytestmark = pytest.mark.lane("test")

transformers = pytest.importorskip("transformers")
IMAGE = 127


def theirs_of(text="qwen2", layer=-1, tied=False, **vision):
    torch.manual_seed(0)
    sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    encoder = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.InternVLConfig(
        vision_config=dict(encoder, image_size=[16, 16], patch_size=[4, 4], **vision),
        text_config=dict(sizes, **heads, model_type=text, tie_word_embeddings=tied),
        image_token_id=IMAGE,
        image_seq_length=4,
        vision_feature_layer=layer,
        tie_word_embeddings=tied,
    )
    model = transformers.InternVLForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    return model


def batch():
    """Tokens (2, 14) and the tiles of both rows (3, 3, 16, 16)."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 120, (2, 14), generator=generator)
    tokens[0, 2:6] = tokens[1, 1:5] = tokens[1, 7:11] = IMAGE
    return tokens, torch.randn(3, 3, 16, 16, generator=generator)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True},
        {"text": "llama", "layer": -2},
        {"text": "qwen3"},
        {"use_mean_pooling": False, "use_qk_norm": True, "norm_type": "rms_norm"},
    ],
)
def test_logits_are_those_of_transformers(options, tmp_path):
    theirs = theirs_of(**options).eval()
    ours, (tokens, tiles) = ours_of(theirs, tmp_path, INTERNVL).eval(), batch()
    assert_same_logits(ours, theirs, tokens, tiles)


@pytest.mark.slow
def test_twenty_steps_are_those_of_transformers(tmp_path):
    theirs, (tokens, tiles) = theirs_of(), batch()
    media = {"images": tiles}, {"pixel_values": tiles}
    assert_trains_alike(ours_of(theirs, tmp_path, INTERNVL), theirs, tokens, IMAGE, *media)


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"text": "llama", "layer": -2}])
def test_a_written_folder_opens_in_transformers(options, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    theirs = theirs_of(**options).eval()
    ours, folder = ours_of(theirs, tmp_path / "theirs", INTERNVL).eval(), tmp_path / "ours"
    folder.mkdir()
    tensors = renamed(INTERNVL.rows_of(ours.config), ours.state_dict(), 2, back=True)
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(INTERNVL.config_to_hf(ours.config)))
    kind = transformers.InternVLForConditionalGeneration
    opened, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    tokens, tiles = batch()
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, pixel_values=tiles).logits
        found = opened.eval()(input_ids=tokens, pixel_values=tiles).logits
    assert torch.equal(found, wanted)


def test_another_model_is_no_internvl(tmp_path):
    """Features of two layers, and SigLIP's, have no keys in its file."""
    config = ours_of(theirs_of(), tmp_path, INTERNVL).config
    for key, value in (
        ("select_layer", (-2, -1)),
        ("transformers", {"model_type": "siglip_vision_model"}),
    ):
        other = dataclasses.replace(
            config, vision=dataclasses.replace(config.vision, **{key: value})
        )
        if key == "transformers":
            key, value = "transformers.model_type", value["model_type"]
        with rejects(f"vision.{key}", value, "family", where="internvl"):
            INTERNVL.config_to_hf(other)


def test_keys_that_change_the_function_are_rejected(tmp_path):
    theirs = theirs_of()
    theirs.config.save_pretrained(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    for key, value, code in (
        ("projector_hidden_act", "relu", "unsupported"),
        ("downsample_ratio", 0.3, "unsupported"),
        ("downsample_ratio", 0, "unsupported"),
        ("downsample_ratio", "half", "unsupported"),
        ("vision_feature_layer", [-1, -2], "unsupported"),
        ("ps_version", "v1", "unknown_key"),
    ):
        with rejects(key, value, code, where="internvl"):
            INTERNVL.config_from_hf({**hf, key: value})


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "internvl_vision", "patch_size": [4, 4], "image_size": [16, 16]},
        {"model_type": "internvl_vision", "layer_scale_init_value": 0.5, "image_size": [448, 448]},
        {"model_type": "dinov2", "patch_size": 4, "image_size": 16, "layerscale_value": 0.25},
    ],
)
def test_what_blocks_add_begins_as_in_transformers(keys):
    """A random scale of a block's output would begin near zero and of any sign."""
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    own = {**sizes, **keys, **({"intermediate_size": 48} if "layerscale_value" not in keys else {})}
    encoder = build_encoder(VisionConfig("transformers", transformers=own))
    initialize(encoder, 0)
    theirs = dict(encoder.model.named_parameters())
    fresh = dict(transformers.AutoModel.from_config(encoder.model.config).named_parameters())
    scales = [n for n in theirs if ".lambda" in n or "layer_scale" in n]
    assert len(scales) == 4
    assert all(torch.equal(theirs[n], fresh[n]) for n in scales)

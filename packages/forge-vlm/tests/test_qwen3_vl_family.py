"""Folders of Qwen3-VL: what transformers writes is read, and what is written opens in transformers."""

import dataclasses
import json

import pytest
import tiny_qwen3_vl as qwen
import torch

from forge_core.model import LayerType
from forge_testing.problems import rejects
from forge_vlm import VLM
from forge_vlm.families import QWEN3_VL, find_family

pytestmark = pytest.mark.lane("test")

transformers = pytest.importorskip("transformers")

ROWS = (
    [5, (qwen.IMAGE, (1, 4, 6)), 4],
    [2, (qwen.VIDEO, (1, 4, 4)), 3, (qwen.VIDEO, (1, 4, 4)), 1],
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module", autouse=True)
def hf():
    """The first model takes seconds: transformers imports its parts when they are asked for."""
    return json.loads(qwen.theirs().config.to_json_string())


def logits(their, our):
    _, tokens, mask, patches, grids = qwen.batch(*ROWS)
    with torch.no_grad():
        wanted = their(**qwen.their_inputs(tokens, mask, patches, grids)).logits
        ids = torch.where(mask > 0, 0, -1)
        found = our(tokens, document_ids=ids, **qwen.our_inputs(patches, grids))
    return found[mask > 0], wanted[mask > 0]


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    "options", [{}, {"tie_word_embeddings": True}, {"rope": {**qwen.ROPE, **YARN}}], ids=str
)
def test_both_ways(options, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    their, read, written = qwen.theirs(**options), tmp_path / "read", tmp_path / "written"
    their.save_pretrained(read)
    given = json.loads((read / "config.json").read_text())
    family = find_family(given)
    config = family.config_from_hf(given)
    our = VLM(config).eval()
    rows = family.rows_of(config)
    our.load_state_dict(qwen.renamed(rows, safetensors.load_file(read / "model.safetensors")))
    found, wanted = logits(their, our)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))

    written.mkdir()
    tensors = qwen.renamed(rows, our.state_dict(), back=True)
    safetensors.save_file(tensors, written / "model.safetensors", {"format": "pt"})
    (written / "config.json").write_text(json.dumps(family.config_to_hf(config)))
    kind = transformers.Qwen3VLForConditionalGeneration
    opened, info = kind.from_pretrained(written, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(opened.eval(), our)[1], wanted)
    assert family.config_from_hf(family.config_to_hf(config)) == config


def test_a_published_file_is_read():
    """Keys of Qwen3-VL-2B-Instruct, in the form of transformers 4."""
    text = {
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643},
        **{"dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu"},
        **{"hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144},
        **{"max_position_embeddings": 262144, "model_type": "qwen3_vl_text"},
        **{"num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8},
        **{"rms_norm_eps": 1e-06, "rope_theta": 5000000, "tie_word_embeddings": True},
        **{"use_cache": True, "vocab_size": 151936},
        "rope_scaling": {
            **{"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
        },
    }
    vision = {
        **{"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_size": 1024},
        **{"hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "initializer_range": 0.02},
        **{"intermediate_size": 4096, "model_type": "qwen3_vl", "num_heads": 16},
        **{"num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16},
        **{"spatial_merge_size": 2, "temporal_patch_size": 2},
    }
    given = {
        **{"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"},
        **{"image_token_id": 151655, "video_token_id": 151656, "tie_word_embeddings": True},
        **{"vision_start_token_id": 151652, "vision_end_token_id": 151653},
        **{"transformers_version": "4.57.0.dev0", "text_config": text, "vision_config": vision},
    }
    config = QWEN3_VL.config_from_hf(given)
    assert (config.rope_theta, config.rope_scaling, config.tie_embeddings) == (5e6, None, True)
    assert config.mrope.axes[:8] == (0, 1, 2, 0, 1, 2, 0, 1)
    assert {n: m.first_id for n, m in config.modalities.items()} == {
        "image": 151655,
        "video": 151656,
    }
    again = QWEN3_VL.config_to_hf(config)
    read = transformers.Qwen3VLConfig.from_dict(given), transformers.Qwen3VLConfig.from_dict(again)
    left = [{k: v for k, v in c.to_dict().items() if k != "transformers_version"} for c in read]
    for c in left:  # what is said of generation, and how weights are stored
        for key in ("dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings"):
            c["text_config"].pop(key, None)
    assert left[0] == left[1]


def test_keys_left_out_are_those_of_transformers(hf):
    text = {k: v for k, v in hf["text_config"].items() if k not in ("rope_parameters", "head_dim")}
    del text["num_key_value_heads"]
    given = {**hf, "text_config": {**text, "num_attention_heads": 32}}
    theirs = transformers.Qwen3VLConfig.from_dict(given).text_config
    config = QWEN3_VL.config_from_hf(given)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.resolved_head_dim == theirs.head_dim
    assert config.mrope.sections == (24, 20, 20)


@pytest.mark.parametrize(
    ("table", "change", "key", "value", "code"),
    [
        (None, {"image_grid": 2}, "image_grid", 2, "unknown_key"),
        ("text_config", {"mrope_style": 2}, "text_config.mrope_style", 2, None),
        (
            "vision_config",
            {"tubelets": 2},
            *("vision.transformers.tubelets", 2, "unknown_key"),
        ),
        (
            "text_config",
            {"rope_parameters": {**qwen.ROPE, "mrope_interleaved": False}},
            *("text_config.mrope_interleaved", False, "unsupported"),
        ),
        (None, {"model_type": "qwen3_vl_moe"}, "model_type", "qwen3_vl_moe", "unknown"),
    ],
)
def test_keys_that_change_the_function_are_rejected(hf, table, change, key, value, code):
    hf = {**hf, **change} if table is None else {**hf, table: {**hf[table], **change}}
    with rejects(key, value, code):
        VLM(find_family(hf).config_from_hf(hf))


@pytest.mark.parametrize(
    ("options", "key", "code"),
    [
        ({"positions": "sequential", "mrope": None}, "positions", "family"),
        ({"qk_norm": False}, "qk_norm", None),
        ({"layer_pattern": ("local", "global")}, "layer_pattern", "family"),
    ],
)
def test_another_model_is_no_qwen3_vl(hf, options, key, code):
    if "layer_pattern" in options:
        options = {**options, "layer_types": {"local": LayerType(window=4)}}
    config = dataclasses.replace(QWEN3_VL.config_from_hf(hf), **options)
    with rejects(key, options[key], code):
        QWEN3_VL.config_to_hf(config)

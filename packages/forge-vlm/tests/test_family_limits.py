"""What files of transformers have no key for is not written, and what they drop without one is not read."""

import json
from dataclasses import replace

import pytest
import test_internvl
import test_llava
import test_smolvlm
import tiny_qwen3_vl
import torch
from hf_folders import distance, renamed, saved

from forge_core.model import AttentionSpec
from forge_testing.problems import rejects
from forge_vlm import VLM
from forge_vlm.families import FAMILIES, INTERNVL, LLAVA

pytestmark = pytest.mark.lane("test")

transformers = pytest.importorskip("transformers")

MODELS = {
    "llava": test_llava.theirs_of,
    "smolvlm": lambda: test_smolvlm.theirs_of("smolvlm"),
    "idefics3": lambda: test_smolvlm.theirs_of("idefics3"),
    "internvl": test_internvl.theirs_of,
    "qwen3_vl": tiny_qwen3_vl.theirs,
}


def config_of(family):
    return FAMILIES[family].config_from_hf(json.loads(MODELS[family]().config.to_json_string()))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(
    ("key", "value"),
    [("bidirectional", "image"), ("bidirectional", "prefix_lm"), ("input_only_ids", 8)],
)
def test_a_model_of_which_transformers_would_compute_another_is_not_written(family, key, value):
    """Both were dropped without a word: transformers read a causal model, or one whose embedding did not fit."""
    config = replace(config_of(family), tie_embeddings=False)
    FAMILIES[family].config_to_hf(config)
    with rejects(key, value, "family", where=family):
        FAMILIES[family].config_to_hf(replace(config, **{key: value}))


def test_a_window_of_all_layers_is_no_qwen3_vl():
    config = replace(config_of("qwen3_vl"), attention=AttentionSpec(window=4))
    with rejects("attention.window", 4, "family"):
        FAMILIES["qwen3_vl"].config_to_hf(config)


def test_internvl_has_no_key_for_the_last_state_without_its_norm():
    """`vision_feature_layer` -1 is the encoder's end, which a norm stands before without mean pooling."""
    config = config_of("internvl")
    vision = replace(config.vision, select_layer=(-1,))
    with rejects("vision.select_layer", (-1,), "family"):
        INTERNVL.config_to_hf(replace(config, vision=vision))


def test_llava_ties_its_head_by_either_key(tmp_path):
    theirs = test_llava.theirs_of()
    hf, tensors = saved(theirs, tmp_path)
    del tensors["language_model.lm_head.weight"]  # as a folder of a tied model has it
    ours = VLM(LLAVA.config_from_hf({**hf, "tie_word_embeddings": True})).eval()
    ours.load_state_dict(renamed(LLAVA.rows_of(ours.config), tensors, ours.config.num_layers))
    theirs.lm_head.weight = theirs.model.language_model.embed_tokens.weight
    tokens, images = test_llava.batch()
    with torch.no_grad():
        wanted = theirs.eval()(input_ids=tokens, pixel_values=images).logits
        assert distance(ours(tokens, images=images), wanted) < 1e-5


def test_llava_is_not_read_where_default_drops_a_patch():
    """transformers drops one token in front, whatever it is: SigLIP has no class token there."""
    hf = json.loads(test_llava.theirs_of("siglip_vision_model", layer=-1).config.to_json_string())
    with rejects("vision_feature_select_strategy", "default", "front"):
        LLAVA.config_from_hf(hf)


@pytest.mark.parametrize(
    ("kind", "places"), [("siglip_vision_model", 4), ("dinov2", 4), ("clip_vision_model", 4)]
)
def test_llava_is_written_so_that_transformers_takes_the_same_patches(kind, places, tmp_path):
    """`select_feature` "patch" of an encoder without a class token was written as "default"."""
    safetensors = pytest.importorskip("safetensors.torch")
    config = config_of("llava")
    keys = {**config.vision.transformers, "model_type": kind}
    if kind == "dinov2":
        own = (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "image_size",
            "patch_size",
        )
        keys = {key: keys[key] for key in own} | {"model_type": kind}
    vision = replace(config.vision, transformers=keys, select_layer=(-1,), select_feature="patch")
    ours = VLM(replace(config, vision=vision)).eval()
    tensors = renamed(LLAVA.rows_of(ours.config), ours.state_dict(), 2, back=True)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    safetensors.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(LLAVA.config_to_hf(ours.config)))
    opened = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    tokens, images = test_llava.batch(places)
    with torch.no_grad():
        found = opened(input_ids=tokens, pixel_values=images).logits
        assert distance(found, ours(tokens, images=images)) < 1e-5


def test_llava_has_no_key_for_patches_after_registers():
    config = config_of("llava")
    keys = dict(model_type="dinov2_with_registers", hidden_size=32, num_hidden_layers=2)
    keys |= dict(num_attention_heads=4, image_size=16, patch_size=8, num_register_tokens=2)
    vision = replace(config.vision, transformers=keys, select_feature="patch")
    with rejects("vision.select_feature", "patch", "front"):
        LLAVA.config_to_hf(replace(config, vision=vision))


#: What transformers 4 wrote into the config.json of a model and of its parts (PretrainedConfig.to_dict).
OLD = {
    **{"return_dict": True, "output_hidden_states": False, "output_attentions": False},
    **{"torchscript": False, "use_bfloat16": False, "tf_legacy_loss": False, "pruned_heads": {}},
    **{"chunk_size_feed_forward": 0, "is_encoder_decoder": False, "is_decoder": False},
    **{"cross_attention_hidden_size": None, "add_cross_attention": False, "prefix": None},
    **{"tie_encoder_decoder": False, "max_length": 20, "min_length": 0, "do_sample": False},
    **{"early_stopping": False, "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0},
    **{"temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "length_penalty": 1.0},
    **{"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0},
    **{"bad_words_ids": None, "num_return_sequences": 1, "output_scores": False},
    **{"return_dict_in_generate": False, "forced_bos_token_id": None, "suppress_tokens": None},
    **{"remove_invalid_values": False, "exponential_decay_length_penalty": None},
    **{"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}},
    **{"finetuning_task": None, "tokenizer_class": None, "task_specific_params": None},
    **{"problem_type": None, "_name_or_path": "", "_attn_implementation_autoset": True},
}
RATES = {"attention_dropout": 0.1, "hidden_dropout": 0.0, "dropout": 0.0}


@pytest.mark.parametrize("family", MODELS)
def test_F170_keys_that_transformers_4_wrote_everywhere_are_read(family):
    """`id2label`, `return_dict`, `chunk_size_feed_forward` stopped every VLM; dropout acts in training only."""
    hf = json.loads(MODELS[family]().config.to_json_string())
    parts = {part: {**hf[part], **OLD} for part in ("text_config", "vision_config")}
    parts["text_config"] |= RATES
    assert FAMILIES[family].config_from_hf({**hf, **OLD, **RATES, **parts}) == config_of(family)
    with rejects("no_such_key", 0.1, "unknown_key", where=family):
        FAMILIES[family].config_from_hf({**hf, **OLD, "no_such_key": 0.1})


@pytest.mark.parametrize("family", ["internvl", "llava", "qwen3_vl", "smolvlm"])
def test_F139_the_head_is_tied_by_the_keys_that_transformers_reads(family):
    """InternVL read the decoder's key where the model's was left out."""
    theirs = MODELS[family]()
    hf = json.loads(theirs.config.to_json_string())
    for outer in ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}):
        for inner in (True, False):
            keys = {k: v for k, v in hf.items() if k != "tie_word_embeddings"} | outer
            keys["text_config"] = {**keys["text_config"], "tie_word_embeddings": inner}
            with torch.device("meta"):
                model = type(theirs)(type(theirs.config).from_dict(json.loads(json.dumps(keys))))
            tied = model.lm_head.weight is model.get_input_embeddings().weight
            assert FAMILIES[family].config_from_hf(keys).tie_embeddings == tied, (outer, inner)


def test_F138_the_tables_of_qwen3_vl_must_agree_in_their_axes():
    hf = json.loads(MODELS["qwen3_vl"]().config.to_json_string())
    text = hf["text_config"]
    axes = {k: v for k, v in text["rope_parameters"].items() if k.startswith("mrope_")}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    yarn |= {"rope_theta": text["rope_parameters"]["rope_theta"]}
    both = {**hf, "text_config": {**text, "rope_scaling": {**yarn, **axes}}}
    found = FAMILIES["qwen3_vl"].config_from_hf(both)
    assert (found.rope_scaling.name, found.mrope) == ("yarn", config_of("qwen3_vl").mrope)
    # transformers takes its own default of the axes then, not the other table's
    with rejects("text_config.rope_parameters", code="conflict", where="qwen3_vl"):
        FAMILIES["qwen3_vl"].config_from_hf({**hf, "text_config": {**text, "rope_scaling": yarn}})

"""Llama 3.2 Vision (Mllama) of transformers, from the same weights: logits, training, generation, folders both ways.

transformers drops the feed-forward of tokens that see no image, but lets their attention see all images; Meta's code drops both,
as ours does (models/llama3/reference_impl/multimodal/model.py of meta-llama/llama-models). So rows here begin with an image, or
`as_meta_does` drops that attention.
"""

import itertools
import json
import types

import pytest
import torch
from hf_folders import assert_trains_alike, distance, saved

from forge_core import SamplingConfig, generate
from forge_testing.problems import rejects
from forge_vlm import VLM, CrossAttentionConfig, FusionConfig
from forge_vlm.families import MLLAMA
from forge_vlm.fusion.cross_attention import visible_images

pytestmark = pytest.mark.lane("test")

transformers = pytest.importorskip("transformers")
IMAGE = 128


def theirs_of(cross=(1, 3), layers=5):
    """Five layers of which two are cross-attention; every parameter random, also the gates that begin at 0."""
    torch.manual_seed(0)
    vision = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_global_layers=1,
        attention_heads=4,
        image_size=16,
        patch_size=8,
        vision_output_dim=64,
        intermediate_layers_indices=[0],
        max_num_tiles=2,
        supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]],
    )
    text = dict(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        cross_attention_layers=list(cross),
        pad_token_id=0,
    )
    config = transformers.MllamaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE
    )
    model = transformers.MllamaForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        std = 1.0 if "embed_tokens" in name else 0.1  # or it would write one token for ever
        torch.nn.init.normal_(parameter, 1.0 if name.endswith("gate") else 0.0, std)
    return model


def ours_of(theirs, folder):
    hf, tensors = saved(theirs, folder)
    config = MLLAMA.config_from_hf(hf)
    names = {hf: ours for hf, ours, _ in MLLAMA.rows_of(config)}
    model = VLM(config)
    model.load_state_dict({names[name]: value for name, value in tensors.items()})
    return model


def batch(first=IMAGE):
    """A row with one image of one tile, and one of two side by side and a third, of two, one and two tiles."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 120, (2, 12), generator=generator)
    tokens[0, 0] = tokens[1, 0] = first
    if first != IMAGE:
        tokens[0, 3] = IMAGE
    tokens[1, 1] = tokens[1, 6] = IMAGE
    if first == IMAGE:
        images, ratios = [1, 3], torch.tensor([1, 2, 1, 3])
    else:
        images, ratios = [1, 2], torch.tensor([1, 2, 3])
    pixels = torch.randn(len(ratios), 2, 3, 16, 16, generator=generator)
    pixels[ratios == 1, 1] = 0
    offsets = torch.tensor([0, *images]).cumsum(0)
    return tokens, {
        "images": types.SimpleNamespace(values=pixels, row_offsets=offsets),
        "aspect_ratio_ids": types.SimpleNamespace(values=ratios, row_offsets=offsets),
    }


def as_theirs(tokens, media, lengths=None):
    """The same for transformers, in the form of its processor: images padded by row, tokens by tiles that they see."""
    processing = pytest.importorskip("transformers.models.mllama.processing_mllama")
    pixels, ratios = (media[name].values for name in ("images", "aspect_ratio_ids"))
    starts = media["images"].row_offsets.tolist()
    rows, most = len(tokens), max(b - a for a, b in itertools.pairwise(starts))
    images, ids = torch.zeros(rows, most, *pixels.shape[1:]), torch.zeros(rows, most).long()
    tiles = torch.zeros(rows, most, 2).long()
    tiles[:, :, 0] = 1  # of padding too
    for row, (a, b) in enumerate(itertools.pairwise(starts)):
        images[row, : b - a], ids[row, : b - a] = pixels[a:b], ratios[a:b]
        tiles[row, : b - a, 1] = (ratios[a:b] > 1).long()
    ranges = [processing.get_cross_attention_token_mask(row, IMAGE) for row in tokens.tolist()]
    for row in ranges:
        row += [[]] * (most - len(row))
    dense = processing.convert_sparse_cross_attention_mask_to_dense(
        ranges, tiles.sum(-1).tolist(), 2, tokens.size(1)
    )
    mask = torch.ones_like(tokens)
    for row, length in enumerate(lengths or []):
        mask[row, : tokens.size(1) - length] = 0
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "pixel_values": images,
        "aspect_ratio_ids": ids,
        "aspect_ratio_mask": tiles,
        "cross_attention_mask": torch.as_tensor(dense),
    }


def as_meta_does(theirs):
    """Tokens that see no image get nothing from attention."""
    for layer in theirs.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            kept = {}

            def keep(module, args, kwargs, kept=kept):
                kept["sees"] = kwargs["full_text_row_masked_out_mask"][:, 0]

            layer.register_forward_pre_hook(keep, with_kwargs=True)
            layer.cross_attn.register_forward_hook(
                lambda module, args, out, kept=kept: (out[0] * kept["sees"], out[1])
            )
    return theirs


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("cross", "layers", "first"),
    [((1, 3), 5, IMAGE), ((0,), 2, IMAGE), ((0, 2, 4), 6, IMAGE), ((1, 3), 5, 7)],
)
def test_logits_are_those_of_transformers(cross, layers, first, tmp_path):
    theirs = theirs_of(cross, layers).eval()
    ours, (tokens, media) = ours_of(theirs, tmp_path).eval(), batch(first)
    if first != IMAGE:
        theirs = as_meta_does(theirs)
    other = {**media, "images": types.SimpleNamespace(**vars(media["images"]))}
    other["images"].values = media["images"].values.flip(-1)
    with torch.no_grad():
        wanted = theirs(**as_theirs(tokens, media)).logits
        found, moved = ours(tokens, **media), ours(tokens, **other)
        plain = theirs(input_ids=tokens).logits
        assert distance(ours(tokens), plain) < 1e-5
    assert distance(found, wanted) < 1e-5
    assert distance(moved, wanted) > 1e-3  # the image has a say


def test_tokens_see_the_images_that_the_processor_lets_them_see():
    processing = pytest.importorskip("transformers.models.mllama.processing_mllama")
    here = torch.rand(40, 12, generator=torch.Generator().manual_seed(0)) < 0.4
    first, stop = visible_images(here, None, "group")
    before = torch.cumsum(here.sum(1), 0) - here.sum(1)
    for row in range(len(here)):
        ranges = processing.get_cross_attention_token_mask(here[row].long().tolist(), 1)
        for token in range(12):
            seen = [k for k, (a, b) in enumerate(ranges) if a <= token and (token < b or b == -1)]
            found = range(int(first[row, token] - before[row]), int(stop[row, token] - before[row]))
            assert list(found) == seen


@pytest.mark.slow
def test_twenty_steps_are_those_of_transformers(tmp_path):
    theirs = theirs_of()
    ours, (tokens, media) = ours_of(theirs, tmp_path), batch()
    others = {k: v for k, v in as_theirs(tokens, media).items() if k != "input_ids"}
    assert_trains_alike(ours, theirs, tokens, IMAGE, media, others)


@pytest.mark.lane("quick")
def test_sixteen_greedy_tokens_are_those_of_transformers(tmp_path):
    """Rows of different lengths, with one and with three images, and one of text alone."""
    theirs = theirs_of().eval()
    ours, (tokens, media) = ours_of(theirs, tmp_path).eval(), batch()
    prompts = [tokens[0, :7], tokens[1], torch.tensor([5, 6, 7])]
    padded = torch.zeros(2, 12, dtype=torch.int64)
    padded[0, 5:], padded[1] = prompts[0], prompts[1]
    options = dict(max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    wanted = theirs.generate(**as_theirs(padded, media, [7, 12]), **options)[:, 12:]
    alone = theirs.generate(prompts[2][None], **options)[:, 3:]
    found = generate(ours, prompts, 16, SamplingConfig(temperature=0.0), extras=media)
    assert torch.equal(found, torch.cat([wanted, alone]))
    assert all(len(row.unique()) > 3 for row in found[:2])  # and is no single token for ever
    media["images"].values = media["images"].values.flip(-1)
    other = generate(ours, prompts, 16, SamplingConfig(temperature=0.0), extras=media)
    assert not torch.equal(other[:2], found[:2])


def test_a_written_folder_opens_in_transformers(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    theirs = theirs_of().eval()
    ours, folder = ours_of(theirs, tmp_path / "theirs"), tmp_path / "ours"
    folder.mkdir()
    state = ours.state_dict()
    tensors = {hf: state[name].contiguous() for hf, name, _ in MLLAMA.rows_of(ours.config)}
    assert len(tensors) == len(state)
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(MLLAMA.config_to_hf(ours.config)))
    opened, info = transformers.MllamaForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    tokens, media = batch()
    with torch.no_grad():
        inputs = as_theirs(tokens, media)
        assert torch.equal(opened.eval()(**inputs).logits, theirs(**inputs).logits)


def test_layers_of_the_released_models_have_the_numbers_of_their_text_models(tmp_path):
    hf, _ = saved(theirs_of(), tmp_path)
    for total, texts in ((40, 32), (100, 80)):
        text = {**hf["text_config"], "num_hidden_layers": total}
        text["cross_attention_layers"] = list(range(3, total, 5))
        config = MLLAMA.config_from_hf({**hf, "text_config": text})
        assert config.num_layers == texts
        cross = config.fusion.cross_attention
        assert cross.layers == CrossAttentionConfig(every_n_layers=4).before(texts)
        back = MLLAMA.config_to_hf(config)["text_config"]
        assert back["cross_attention_layers"] == text["cross_attention_layers"]
        assert back["num_hidden_layers"] == total


def test_keys_that_change_the_function_are_rejected(tmp_path):
    hf, _ = saved(theirs_of(), tmp_path)
    text = hf["text_config"]
    for key, value, code in (
        ("cross_attention_layers", [1, 2], "range"),
        ("cross_attention_layers", [4], "range"),
        ("dropout", -0.1, "type"),
        ("hidden_act", "relu", None),
        ("model_type", "llama", "unknown"),
    ):
        with rejects(f"text_config.{key}", value, code, where="mllama"):
            MLLAMA.config_from_hf({**hf, "text_config": {**text, key: value}})
    config = MLLAMA.config_from_hf(hf)
    fusion = FusionConfig(
        "cross_attention", cross_attention=CrossAttentionConfig(layers=(1,), sees="all")
    )
    with rejects("fusion.cross_attention.qk_norm", False, "family"):
        MLLAMA.config_to_hf(type(config)(**{**vars(config), "fusion": fusion}))


def test_options_of_other_encoders_are_rejected(tmp_path):
    hf, _ = saved(theirs_of(), tmp_path)
    vision = {**hf["vision_config"], "vision_output_dim": 32}
    with rejects("vision.transformers.vision_output_dim", 32, "mismatch"):
        VLM(MLLAMA.config_from_hf({**hf, "vision_config": vision}))

"""Idefics3 and SmolVLM of transformers, from the same weights: logits, training, folders both ways."""

import json

import hf_folders
import pytest
import torch
from hf_folders import assert_trains_alike, distance, renamed
from tiny_tokenizer import tokenizer_of

from forge_testing.problems import rejects
from forge_vlm import VLM
from forge_vlm.families import FAMILIES
from forge_vlm.resolution import ResolutionConfig, TilesConfig, build_resolution

pytestmark = pytest.mark.lane("test")

transformers = pytest.importorskip("transformers")
CLASSES = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}
IMAGE = 127
TILES = 5  # of both rows, 2 and 3


def theirs_of(name, text="llama", tied=False, vocab_size=128, image=IMAGE):
    torch.manual_seed(0)
    kind = CLASSES[name]
    sizes = dict(vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = getattr(transformers, f"{kind}Config")(
        vision_config=dict(vision, image_size=16, patch_size=4),
        text_config=dict(sizes, **heads, model_type=text, tie_word_embeddings=tied, pad_token_id=0),
        image_token_id=image,
        scale_factor=2,
        tie_word_embeddings=tied,
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    return model


def ours_of(theirs, folder):
    return hf_folders.ours_of(theirs, folder, FAMILIES[theirs.config.model_type])


def batch():
    """Tokens (2, 18), tiles (5, 3, 16, 16) and their masks: the last tile of each row is padded."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 120, (2, 18), generator=generator)
    for row, start in ((0, 1), (0, 6), (1, 1), (1, 7), (1, 12)):
        tokens[row, start : start + 4] = IMAGE
    masks = torch.ones(TILES, 16, 16, dtype=torch.uint8)
    masks[1, 9:], masks[4, :, 6:] = 0, 0
    return tokens, torch.randn(TILES, 3, 16, 16, generator=generator), masks


def media_of(tiles, masks=None):
    """The same tiles by row, as transformers takes them: a row with fewer has tiles of zeros at its end."""
    media = {"pixel_values": torch.zeros(2, 3, 3, 16, 16)}
    media["pixel_values"][0, :2], media["pixel_values"][1] = tiles[:2], tiles[2:]
    if masks is not None:
        media["pixel_attention_mask"] = torch.zeros(2, 3, 16, 16, dtype=torch.long)
        media["pixel_attention_mask"][0, :2] = masks[:2]
        media["pixel_attention_mask"][1] = masks[2:]
    return media


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("smolvlm", {}),
        ("smolvlm", {"tied": True}),
        ("smolvlm", {"text": "qwen2"}),
        ("idefics3", {}),
        ("idefics3", {"text": "mistral"}),
    ],
)
def test_logits_are_those_of_transformers(name, options, tmp_path):
    theirs = theirs_of(name, **options).eval()
    ours, (tokens, tiles, masks) = ours_of(theirs, tmp_path).eval(), batch()
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, **media_of(tiles)).logits
        found, other = ours(tokens, images=tiles), ours(tokens, images=tiles.flip(0))
        masked = theirs(input_ids=tokens, **media_of(tiles, masks)).logits
        seen = ours(tokens, images=tiles, image_masks=masks)
    assert distance(found, wanted) < 1e-5
    assert distance(other, wanted) > 1e-3  # the images have a say
    assert distance(seen, masked) < 1e-5
    assert distance(masked, wanted) > 1e-3  # so have the masks


def test_an_image_and_a_prompt_give_the_logits_of_processor_and_model(tmp_path):
    """From bytes of a picture: tiles, text around them, token ids, normalisation, encoder, decoder."""
    pytest.importorskip("PIL")
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer, sizes = (
        tokenizer_of(),
        dict(size={"longest_edge": 64}, max_image_size={"longest_edge": 16}),
    )
    processor = transformers.Idefics3Processor(
        Idefics3ImageProcessorPil(**sizes), tokenizer, image_seq_len=4
    )
    image = tokenizer.convert_tokens_to_ids("<image>")
    theirs = theirs_of("idefics3", vocab_size=320, image=image).eval()
    ours = ours_of(theirs, tmp_path).eval()
    picture = torch.randint(0, 256, (30, 70, 3), dtype=torch.uint8)
    given = processor(images=[picture.numpy()], text="a <image> b", return_tensors="pt")
    tiles = TilesConfig(tile_size=16, longest_edge=64)
    resolution = build_resolution(ResolutionConfig("tiles", tiles=tiles))
    text = resolution.text(resolution.layout(30, 70), ours.adapter.tokens(4, 4), "<image>")
    tokens = torch.tensor([tokenizer(f"a {text} b")["input_ids"]])
    with torch.no_grad():
        wanted = theirs(**given).logits
        assert distance(ours(tokens, images=resolution(picture)), wanted) < 1e-5


@pytest.mark.lane("quick")
def test_masks_may_be_left_out_and_a_batch_may_have_no_image(tmp_path):
    model, (tokens, tiles, masks) = ours_of(theirs_of("smolvlm"), tmp_path).eval(), batch()
    assert model.extra_inputs == ("images", "after_embedding")  # what a batch must hold
    text = tokens.where(tokens != IMAGE, 5)
    empty = {"images": tiles[:0], "image_masks": masks[:0]}
    assert torch.equal(model(text, **empty), model(text))
    whole = torch.ones_like(masks)
    torch.testing.assert_close(
        model(tokens, images=tiles, image_masks=whole), model(tokens, images=tiles)
    )


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("name", list(CLASSES))
def test_twenty_steps_are_those_of_transformers(name, tmp_path):
    theirs = theirs_of(name)
    ours, (tokens, tiles, masks) = ours_of(theirs, tmp_path), batch()
    own = {"images": tiles, "image_masks": masks}
    assert_trains_alike(ours, theirs, tokens, IMAGE, own, media_of(tiles, masks))


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("name", "tied"), [("smolvlm", False), ("smolvlm", True), ("idefics3", False)]
)
def test_a_written_folder_opens_in_transformers(name, tied, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    theirs, family = theirs_of(name, tied=tied).eval(), FAMILIES[name]
    ours, folder = ours_of(theirs, tmp_path / "theirs").eval(), tmp_path / "ours"
    folder.mkdir()
    tensors = renamed(family.rows_of(ours.config), ours.state_dict(), 2, back=True)
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(family.config_to_hf(ours.config)))
    kind = getattr(transformers, f"{CLASSES[name]}ForConditionalGeneration")
    opened, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    tokens, tiles, masks = batch()
    media = media_of(tiles, masks)
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, **media).logits
        assert torch.equal(opened.eval()(input_ids=tokens, **media).logits, wanted)


def test_a_published_file_is_read_and_changes_of_the_function_rejected(tmp_path):
    """SmolVLM-256M-Instruct's file has keys of the code that trained it; transformers reads none of them."""
    theirs_of("idefics3").config.save_pretrained(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    family = FAMILIES["idefics3"]
    unread = {"perceiver_config": {"num_key_value_heads": 1}, "use_resampler": False}
    published = {
        **hf,
        "text_config": {**hf["text_config"], **unread, "_flash_attn_2_enabled": True},
        "vision_config": {**hf["vision_config"], "model_type": "idefics3", "use_base_siglip": True},
    }
    assert family.config_from_hf(published) == family.config_from_hf(hf)
    vision = {**hf["vision_config"], "tubelets": 2}
    for change, key, value, code in (
        ({"use_resampler": True}, "use_resampler", True, "unknown_key"),
        ({"vision_config": vision}, "vision.transformers.tubelets", 2, "unknown_key"),
        ({"text_config": None}, "text_config", ..., "type"),
    ):
        with rejects(key, value, code):
            VLM(family.config_from_hf({**hf, **change}))


def test_another_model_is_no_smolvlm(tmp_path):
    config = ours_of(theirs_of("smolvlm"), tmp_path).config
    with rejects("vision.transformers.model_type", "smolvlm_vision", where="idefics3"):
        FAMILIES["idefics3"].config_to_hf(config)

"""Positions that forward makes where none are given: those of a plan, and behind cached tokens."""

import pytest
import torch

from forge_core.model import MRopeConfig
from forge_testing.problems import rejects
from forge_vlm import VLM, ModalityConfig, SequencePlan, VisionConfig, VLMConfig
from forge_vlm.vision import ViTConfig

pytestmark = pytest.mark.lane("test")

IMAGE = 63
MROPE = {"positions": "mrope", "mrope": MRopeConfig((2, 1, 1))}
NAMES = {"text_preserving": {"positions": "text_preserving"}, "mrope": MROPE}


def model_with(**options):
    vit = ViTConfig(image_size=8, patch_size=4, dim=8, num_layers=1, num_heads=2)
    sizes = {"vocab_size": 64, "dim": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 32}
    config = VLMConfig(
        **sizes,
        vision=VisionConfig(vit=vit),
        modalities={"image": ModalityConfig(first_id=IMAGE)},
        **options,
    )
    return VLM(config).eval()


def packed():
    """A row of two documents with an image each and one without, one that is padded on both sides, and one of text."""
    tokens = torch.randint(1, 60, (3, 16), generator=torch.Generator().manual_seed(0))
    tokens[0, 2:6] = tokens[0, 9:13] = tokens[1, 5:9] = IMAGE
    ids = torch.zeros(3, 16, dtype=torch.int64)
    ids[0, 7:], ids[0, 14:] = 1, 2
    ids[1, :3] = ids[1, 12:] = -1
    return tokens, ids, torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
def test_they_are_those_of_the_plan(name):
    model, (tokens, ids, images) = model_with(**NAMES[name]), packed()
    image = [(1, 2, 2)]
    plan = SequencePlan.of(tokens, ids, {IMAGE: 1}, [image * 2, image, []])
    wanted = model(tokens, plan.positions(name), ids, images=images)
    assert torch.equal(model(tokens, document_ids=ids, images=images), wanted)
    counted = model(tokens, plan.positions(), ids, images=images)
    assert not torch.equal(counted[:2], wanted[:2])
    assert torch.equal(counted[2], wanted[2])


@pytest.mark.parametrize("name", NAMES)
def test_they_go_on_after_cached_tokens(name):
    """A padded row goes on where its own tokens end; a document that begins later begins at 0."""
    model, (tokens, ids, images) = model_with(**NAMES[name]), packed()
    ids[1] = torch.where(torch.arange(16) < 3, -1, 0)
    with torch.no_grad():
        whole = model(tokens, document_ids=ids, images=images)
        for cut in (13, 14, 15):  # before, at and behind the last document of the first row
            cache = model.new_cache(16)
            model(tokens[:, :cut], document_ids=ids[:, :cut], images=images, cache=cache)
            rest = model(tokens[:, cut:], document_ids=ids[:, cut:], cache=cache)
            torch.testing.assert_close(rest, whole[:, cut:], rtol=1e-5, atol=1e-6)


def test_a_document_whose_id_was_there_before_begins_at_0():
    model, (tokens, _, images) = model_with(**MROPE), packed()
    row, ids = tokens[:1], torch.tensor([[0] * 7 + [1] * 7 + [0] * 2])
    with torch.no_grad():
        whole = model(row, document_ids=ids, images=images[:2])
        cache = model.new_cache(16)
        model(row[:, :6], document_ids=ids[:, :6], cache=cache, images=images[:1])
        # shifted as a whole, a document would have the same logits
        counted = cache.continued(None, row[:, 6:], ids[:, 6:])
        assert counted.tolist() == [[4, *range(7), 0, 1]]
        rest = model(row[:, 6:], document_ids=ids[:, 6:], cache=cache, images=images[1:2])
    torch.testing.assert_close(rest, whole[:, 6:], rtol=1e-5, atol=1e-6)


def test_an_image_after_cached_text_begins_where_the_text_ends():
    model, (tokens, _, images) = model_with(**MROPE), packed()
    row, image = tokens[1:2], images[:1]
    with torch.no_grad():
        whole = model(row, images=image)
        cache = model.new_cache(16)
        model(row[:, :4], cache=cache)
        rest = model(row[:, 4:], cache=cache, images=image)
    torch.testing.assert_close(rest, whole[:, 4:], rtol=1e-5, atol=1e-6)


def test_inputs_without_positions_are_rejected():
    model, (tokens, ids, images) = model_with(**MROPE), packed()
    moved = tokens.clone()
    moved[0, 12], moved[0, 15] = 5, IMAGE
    with rejects("grids", (1, 2, 2), "tokens", where="row 0"):
        model(moved, document_ids=ids, images=images)
    with rejects("positions", "mrope", "not_square"):
        model(tokens, document_ids=ids, images=torch.cat([images, images[:1]]))
    with rejects("positions", ..., "missing"):
        model(torch.zeros(1, 4, 16))

"""Qwen3-VL: patches of images of any sizes, DeepStack, positions of three axes; equal to transformers."""

from dataclasses import replace

import pytest
import tiny_qwen3_vl as qwen
import torch
from hf_folders import distance

from forge_core import SamplingConfig, Transformer, generate, initialize
from forge_testing.problems import assert_problem, rejects
from forge_vlm import VLM, AdapterConfig, VisionConfig
from forge_vlm._shared.problems import ProblemError
from forge_vlm.vision import build_encoder, cut_patches
from forge_vlm.vision.patches import PATCH_MODELS

pytestmark = pytest.mark.lane("test")

pytest.importorskip("transformers")

IMAGE, VIDEO = qwen.IMAGE, qwen.VIDEO


@pytest.fixture(scope="module")
def models():
    their = qwen.theirs()
    return their, qwen.ours(their)


IMAGE_ROWS = (
    [5, (IMAGE, (1, 4, 6)), 4, (IMAGE, (1, 4, 4)), 3],
    [2, (IMAGE, (1, 8, 2)), 11],
)
CASES = {
    "images": IMAGE_ROWS,
    "a text row among them": ([7], *IMAGE_ROWS, [12]),
    # frames of a video are parted by their timestamps
    "a video": ([3, (VIDEO, (1, 4, 4)), 4, (VIDEO, (1, 4, 4)), 2], [9, (IMAGE, (1, 2, 2)), 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(models, name):
    their, our = models
    _, tokens, mask, patches, grids = qwen.batch(*CASES[name])
    ids = torch.where(mask > 0, 0, -1)
    with torch.no_grad():
        wanted = their(**qwen.their_inputs(tokens, mask, patches, grids)).logits
        out = our(tokens, document_ids=ids, **qwen.our_inputs(patches, grids))
        other = [p + 0.5 for p in patches]
        moved = our(tokens, document_ids=ids, **qwen.our_inputs(other, grids))
    real, text = mask.bool(), mask.bool() & (tokens < IMAGE)
    assert distance(out[real], wanted[real]) < 1e-5
    assert distance(moved[text], out[text]) > 100 * 1e-5


def test_a_video_of_several_frames_has_one_grid_in_transformers(models):
    """and here it may have one, too: its frames lie between timestamps."""
    their, our = models
    _, tokens, mask, patches, grids = qwen.batch(CASES["a video"][0])
    given = qwen.their_inputs(tokens, mask, patches, grids)
    given["video_grid_thw"] = torch.tensor([[2, 4, 4]])
    with torch.no_grad():
        wanted = their(**given).logits
        out = our(tokens, patches=torch.cat(patches), grids=given["video_grid_thw"])
    assert distance(out, wanted) < 1e-5


def test_positions_are_those_of_get_rope_index(models):
    their, our = models
    for side in ("left", "right"):
        _, tokens, mask, patches, grids = qwen.batch(*CASES["images"], [4], [6, (IMAGE, (1, 2, 6))])
        if side == "right":
            rows = [torch.roll(t, -int((m == 0).sum())) for t, m in zip(tokens, mask)]
            tokens, mask = torch.stack(rows), mask.flip(1)
        given = qwen.their_inputs(tokens, mask, patches, grids)
        wanted, deltas = their.model.get_rope_index(
            tokens,
            given["mm_token_type_ids"],
            image_grid_thw=given["image_grid_thw"],
            attention_mask=mask,
        )
        ids = torch.where(mask > 0, 0, -1)
        found = our._positions(tokens, ids, None, qwen.our_inputs(patches, grids))
        assert torch.equal(found.movedim(1, 0)[:, mask > 0], wanted[:, mask > 0])
        cache = our.new_cache(64)
        cache.advance(found, ids)
        if side == "left":
            assert torch.equal(cache.next_positions, deltas + mask.sum(1, keepdim=True))


@pytest.mark.parametrize("model_type", PATCH_MODELS)
def test_images_of_any_sizes_are_packed(model_type):
    """Each alone has the same features, and the same as where transformers reads the grids itself."""
    config = VisionConfig("transformers", transformers={"model_type": model_type, **qwen.VISION})
    encoder = build_encoder(config)
    _, _, _, patches, grids = qwen.batch(*CASES["a video"])
    media = qwen.our_inputs(patches, grids)
    with torch.no_grad():
        found = encoder(**media)
        wanted = encoder.model(media["patches"], grid_thw=media["grids"])
        alone = [encoder(**qwen.our_inputs([p], [g])) for p, g in zip(patches, grids)]
    assert found.tokens.shape == (1, sum(t * h * w for _, (t, h, w) in grids) // 4, 64)
    assert torch.equal(found.tokens[0], wanted.pooler_output)
    assert distance(torch.cat([a.tokens for a in alone], 1), found.tokens) < 1e-5
    for layer, theirs in enumerate(wanted.deepstack_features):
        assert torch.equal(found.layers[layer], theirs)
        assert distance(torch.cat([a.layers[layer] for a in alone]), theirs) < 1e-5


def test_weights_begin_alike_on_the_meta_device(models):
    plain = VLM(models[1].config)
    with torch.device("meta"):
        made = VLM(models[1].config)
    made.to_empty(device="cpu")
    initialize(made, seed=0)
    for model in (plain, made):
        names = dict([*model.named_parameters(), *model.named_buffers()])
        assert all(torch.equal(names[n], b) for n, b in plain.named_buffers())
        assert all(torch.equal(names[n], p) for n, p in plain.named_parameters())


@pytest.mark.parametrize("key", ["patch_size", "merge", "patch_time"])
def test_patches_of_another_size_are_rejected_before_the_first_step(models, key):
    pytest.importorskip("numpy")
    from forge_vlm.data.options import fit_problems

    options = {
        **{"positions": "mrope", "image": "<image>", "resolution": {"name": "budget"}},
        **{"patch_size": 4, "merge": 2, "patch_time": 2},
    }
    assert fit_problems(options, qwen.IMAGE, models[1], "here") == []
    (found,) = fit_problems({**options, key: 1}, qwen.IMAGE, models[1], "here")
    assert_problem(ProblemError([found]), f"here.{key}", 1, "encoder")
    assert str(options[key]) in found.rule


def test_patches_are_those_of_its_processor(models):
    """The order of patches and of what a patch holds; an image stands for two frames."""
    pytest.importorskip("PIL")
    from transformers import Qwen2VLImageProcessorPil

    process = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=8, max_pixels=10**6,
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    image = torch.randint(0, 256, (3, 16, 24), dtype=torch.uint8)
    wanted = process([image.numpy()], return_tensors="pt", input_data_format="channels_first")
    patches, grid = cut_patches(image[None], patch_size=4, merge=2)
    assert grid.tolist() == wanted["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert distance(models[1].vision._pixels(patches), wanted["pixel_values"]) < 1e-6
    video, grid = cut_patches(image[None].expand(3, -1, -1, -1), patch_size=4, merge=2)
    assert grid.tolist() == [[2, 4, 6]]
    assert torch.equal(video, patches.repeat(2, 1))


@pytest.mark.parametrize(
    ("patches", "grids", "key", "value", "code"),
    [
        ((24, 96), [[1, 4, 4]], "patches", (24, 96), "shape"),
        ((16, 48), [[1, 4, 4]], "patches", (16, 48), "shape"),
        ((12, 96), [[1, 4, 3]], "grids", [1, 4, 3], "divides"),
        ((16, 96), [[1, 2, 8]], "grids", (1, 1, 4), "tokens"),
    ],
)
def test_grids_that_are_not_those_of_the_patches_are_rejected(
    models, patches, grids, key, value, code
):
    parted = code == "tokens"
    row = torch.tensor([[1, IMAGE, IMAGE, 2 if parted else IMAGE, IMAGE, IMAGE if parted else 2]])
    with rejects(key, value, code):
        models[1](row, patches=torch.zeros(patches), grids=torch.tensor(grids))


def test_grids_of_more_images_than_the_rows_hold_are_rejected(models):
    media = {"patches": torch.zeros(8, 96), "grids": torch.tensor([[1, 2, 2], [1, 2, 2]])}
    with rejects("grids", 2, "number"):
        models[1](torch.tensor([[1, IMAGE, 2]]), **media)
    assert models[1].host_inputs == (
        "document_ids",
        "branch_ids",
        "grids",
    )  # a copy back would be a sync


def test_features_of_another_width_than_the_stream_are_rejected(models):
    config = models[1].config
    vision = VisionConfig(
        "transformers", transformers={**config.vision.transformers, "out_hidden_size": 48}
    )
    with rejects("adapter.name", "none", "width"):
        VLM(replace(config, vision=vision))
    other = VLM(replace(config, vision=vision, adapter=AdapterConfig("linear")))
    media = {"patches": torch.zeros(4, 96), "grids": torch.tensor([[1, 2, 2]])}
    with rejects("vision.transformers.out_hidden_size", 48, "width"):
        other(torch.tensor([[1, IMAGE, 2]]), **media)


def test_stages_with_fewer_blocks_than_features_are_rejected(models):
    model = VLM(replace(models[1].config, num_layers=1))
    media = {"patches": torch.zeros(4, 96), "grids": torch.tensor([[1, 2, 2]])}
    with rejects("features.layers", 2, "stage"):
        model(torch.tensor([[1, IMAGE, 2]]), **media)


def test_only_text_equals_the_text_model(models):
    _, our = models
    text = Transformer(our.config)
    text.load_state_dict({n: v for n, v in our.state_dict().items() if n in text.state_dict()})
    tokens = torch.randint(3, 120, (2, 11))
    wanted = text(tokens)
    assert torch.equal(our(tokens), wanted)
    nothing = {"patches": torch.zeros(0, 96), "grids": torch.zeros(0, 3, dtype=torch.int64)}
    out = our(tokens, **nothing)
    assert torch.equal(out, wanted)
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in our.vision.parameters())
    our.zero_grad(set_to_none=True)


def test_greedy_generation_is_that_of_transformers(models):
    """Batched and uneven; the image of a row moves the position of its answer."""
    their, our = models
    lines, tokens, mask, patches, grids = qwen.batch(*CASES["a text row among them"])
    given = qwen.their_inputs(tokens, mask, patches, grids)
    wanted = their.generate(
        **given, max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    greedy = SamplingConfig(temperature=0.0)
    extras = qwen.our_inputs(patches, grids)
    assert torch.equal(generate(our, lines, 16, greedy, extras=extras), wanted[:, tokens.size(1) :])


def test_a_second_turn_goes_on_after_the_first(models):
    """A cache that is fed text, an image, text and another image equals one forward of all."""
    _, our = models
    lines, _, _, patches, grids = qwen.batch(
        [6], [(IMAGE, (1, 4, 6)), 3], [2], [2, (IMAGE, (1, 2, 4)), 5]
    )
    cache, last, used = our.new_cache(64), None, 0
    with torch.no_grad():
        whole = our(
            torch.tensor([[token for line in lines for token in line]]),
            **qwen.our_inputs(patches, grids),
        )[:, -5:]
        for turn, images in zip(lines, (0, 1, 0, 1)):
            part = slice(used, used + images)
            media = qwen.our_inputs(patches[part], grids[part]) if images else {}
            last, used = our(torch.tensor([turn]), cache=cache, **media), used + images
    assert distance(last[:, -5:], whole) < 1e-5


def test_packed_documents_equal_single_documents(models):
    _, our = models
    _, tokens, _, patches, grids = qwen.batch([*CASES["images"][0], *CASES["images"][1]])
    first = 5 + 6 + 4 + 4 + 3
    ids = torch.zeros_like(tokens)
    ids[:, first:] = 1
    with torch.no_grad():
        packed = our(tokens, document_ids=ids, **qwen.our_inputs(patches, grids))
        for rows, images in ((slice(0, first), slice(0, 2)), (slice(first, None), slice(2, 3))):
            alone = our(tokens[:, rows], **qwen.our_inputs(patches[images], grids[images]))
            assert distance(packed[:, rows], alone) < 1e-5


@pytest.mark.slow
def test_twenty_steps_of_training_are_those_of_transformers():
    their = qwen.theirs()
    our = qwen.ours(their).train()
    their.train()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-4) for m in (their, our)]
    losses = [[], []]
    for step in range(20):
        _, tokens, mask, patches, grids = qwen.batch(*CASES["a text row among them"], seed=step % 2)
        given, ids = qwen.their_inputs(tokens, mask, patches, grids), torch.where(mask > 0, 0, -1)
        learnt = (mask[:, 1:] > 0) & (mask[:, :-1] > 0) & (tokens[:, 1:] < IMAGE)
        labels = torch.where(learnt, tokens[:, 1:], -100)
        for number, optimizer in enumerate(optimizers):
            if number == 0:
                logits = their(**given).logits
            else:
                logits = our(tokens, document_ids=ids, **qwen.our_inputs(patches, grids))
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[number].append(loss.item())
    worst = max(abs(a - b) / a for a, b in zip(*losses))
    assert worst < 1e-5, worst
    assert losses[0][-1] < losses[0][0]

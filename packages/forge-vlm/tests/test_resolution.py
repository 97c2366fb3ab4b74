"""Resolutions against the image processors of transformers: pixels, tiles and their order, token ids of prompts."""

import importlib

import pytest
import torch
from tiny_tokenizer import tokenizer_of

from forge_testing.problems import rejects
from forge_vlm.resolution import (
    AspectTilesConfig,
    BudgetConfig,
    FixedConfig,
    Layout,
    ResolutionConfig,
    TilesConfig,
    build_resolution,
)

pytestmark = pytest.mark.lane("test")

SIZES = [(30, 70), (70, 30), (16, 16), (5, 9), (64, 64), (63, 64), (2, 90), (100, 47), (33, 31)]
RAW = dict(do_rescale=False, do_normalize=False)  # bytes in, bytes out


def processor_of(model, kind):
    """An image processor that needs no torchvision."""
    pytest.importorskip("PIL")
    pytest.importorskip("transformers")
    module = f"transformers.models.{model}.image_processing_pil_{model}"
    return getattr(importlib.import_module(module), f"{kind}ImageProcessorPil")


def picture(height, width):
    generator = torch.Generator().manual_seed(height * 1000 + width)
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)


def pixels_of(processor, image, **options):
    out = processor(images=[image.numpy()], return_tensors="pt", **RAW, **options)
    return out["pixel_values"]


@pytest.mark.parametrize("height_width", SIZES)
@pytest.mark.parametrize("split", [True, False])
def test_tiles_are_those_of_smolvlm(height_width, split):
    sizes = dict(size={"longest_edge": 64}, max_image_size={"longest_edge": 16})
    processor = processor_of("smolvlm", "SmolVLM")(**sizes, do_image_splitting=split)
    ours = build_resolution(
        ResolutionConfig("tiles", tiles=TilesConfig(tile_size=16, longest_edge=64, split=split))
    )
    image = picture(*height_width)
    theirs = processor(images=[[image.numpy()]], return_row_col_info=True, **RAW)
    tiles, layout = ours(image), ours.layout(*height_width)
    assert (layout.rows, layout.columns) == (theirs["rows"][0][0], theirs["cols"][0][0])
    assert len(tiles) == layout.num_tiles
    assert torch.equal(tiles.float(), torch.as_tensor(theirs["pixel_values"][0]).float())


def test_token_ids_and_tiles_are_those_of_the_processor():
    """Two images in one prompt; SmolVLM's processor writes the same text, but wants torchvision for its videos."""
    kind = processor_of("idefics3", "Idefics3")
    transformers, tokenizer = pytest.importorskip("transformers"), tokenizer_of()
    sizes = dict(size={"longest_edge": 64}, max_image_size={"longest_edge": 16})
    processor = transformers.Idefics3Processor(kind(**sizes), tokenizer, image_seq_len=4)
    resolution = build_resolution(
        ResolutionConfig("tiles", tiles=TilesConfig(tile_size=16, longest_edge=64))
    )
    images = [picture(30, 70), picture(100, 47)]
    prompt = "Left: <image> right: <image> which?"
    theirs = processor(
        images=[i.numpy() for i in images], text=prompt, return_tensors="pt", images_kwargs=RAW
    )
    texts = [resolution.text(resolution.layout(*image.shape[:2]), 4, "<image>") for image in images]
    pieces = prompt.split("<image>")
    ours = pieces[0] + texts[0] + pieces[1] + texts[1] + pieces[2]
    assert tokenizer(ours)["input_ids"] == theirs["input_ids"][0].tolist()
    tiles = torch.cat([resolution(image) for image in images])
    assert torch.equal(tiles.float(), theirs["pixel_values"][0].float())


@pytest.mark.parametrize("layout", [Layout(16, 16), Layout(16, 16, 1, 3), Layout(16, 16, 4, 2)])
def test_the_text_of_tiles_is_that_of_smolvlm(layout):
    pytest.importorskip("transformers")
    smolvlm = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
    resolution = build_resolution(ResolutionConfig("tiles"))
    marks = ("<fake_token_around_image>", "<image>", "<global-img>")
    wanted = smolvlm.get_image_prompt_string(layout.rows, layout.columns, 5, *marks)
    assert resolution.text(layout, 5, "<image>") == wanted


@pytest.mark.parametrize("height_width", SIZES)
@pytest.mark.parametrize(("least", "most"), [(1, 12), (2, 6)])
def test_aspect_tiles_are_those_of_internvl(height_width, least, most):
    options = dict(crop_to_patches=True, min_patches=least, max_patches=most)
    processor = processor_of("got_ocr2", "GotOcr2")(size={"height": 16, "width": 16}, **options)
    config = AspectTilesConfig(tile_size=16, min_tiles=least, max_tiles=most)
    ours, image = build_resolution(ResolutionConfig("aspect_tiles", aspect_tiles=config)), None
    image = picture(*height_width)
    assert torch.equal(ours(image), pixels_of(processor, image))
    layout = ours.layout(*height_width)
    context = "<IMG_CONTEXT>" * (3 * layout.num_tiles)
    assert ours.text(layout, 3, "<IMG_CONTEXT>") == f"<img>{context}</img>"


def test_grids_are_those_of_internvl():
    """Sizes with the aspect of several grids among them: the image's area then decides."""
    processor_of("got_ocr2", "GotOcr2")
    module = importlib.import_module("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    ours = build_resolution(ResolutionConfig("aspect_tiles"))
    for height, width in ((h, w) for h in range(60, 1400, 60) for w in range(60, 1400, 60)):
        columns, rows = module.get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
        layout = ours.layout(height, width)
        assert (layout.rows, layout.columns) == (
            (0, 0) if rows == columns == 1 else (rows, columns)
        )


@pytest.mark.parametrize("height_width", [(30, 70), (70, 30), (64, 64), (5, 9), (33, 31)])
@pytest.mark.parametrize("fit", ["pad", "stretch", "crop"])
def test_one_square_is_that_of_llava_siglip_and_clip(height_width, fit):
    mean = (0.48145466, 0.4578275, 0.40821073)
    square = {"height": 24, "width": 24}
    if fit == "stretch":
        processor = processor_of("siglip", "Siglip")(size=square)
    else:
        kind, pads = processor_of("llava", "Llava"), fit == "pad"
        processor = kind(
            do_pad=pads, size=square if pads else {"shortest_edge": 24}, crop_size=square
        )
    ours = build_resolution(ResolutionConfig("fixed", fixed=FixedConfig(24, fit)), mean)
    image = picture(*height_width)
    wanted = pixels_of(processor, image, image_mean=mean) if fit == "pad" else None
    wanted = pixels_of(processor, image) if wanted is None else wanted
    assert torch.equal(ours(image), wanted)
    assert ours.text(ours.layout(*height_width), 3, "<i>") == "<i><i><i>"


def test_sizes_under_a_budget_are_those_of_qwen2_vl():
    pytest.importorskip("transformers")
    module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    least, most = 28 * 28 * 100, 28 * 28 * 600
    config = BudgetConfig(multiple=28, min_pixels=least, max_pixels=most)
    resolution = build_resolution(ResolutionConfig("budget", budget=config))
    generator = torch.Generator().manual_seed(0)
    found = set()
    for height, width in torch.randint(20, 1000, (300, 2), generator=generator).tolist():
        wanted = module.smart_resize(height, width, 28, least, most)
        assert resolution.layout(height, width) == Layout(*wanted)
        found.add((height * width < least) - (height * width > most))
    assert found == {-1, 0, 1}


def test_pixels_under_a_budget_are_those_of_qwen2_vl():
    processor = processor_of("qwen2_vl", "Qwen2VL")(
        patch_size=4,
        merge_size=1,
        temporal_patch_size=1,
        size={"shortest_edge": 64, "longest_edge": 1024},
    )
    config = BudgetConfig(multiple=4, min_pixels=64, max_pixels=1024)
    ours = build_resolution(ResolutionConfig("budget", budget=config))(
        picture(50, 70)
    )  # (1, 3, H, W)
    out = processor(images=[picture(50, 70).numpy()], return_tensors="pt", **RAW)
    assert out["image_grid_thw"].tolist() == [[1, ours.size(2) // 4, ours.size(3) // 4]]
    patches = ours[0].unflatten(1, (-1, 4)).unflatten(3, (-1, 4)).permute(1, 3, 0, 2, 4)
    assert torch.equal(patches.flatten(2).flatten(0, 1).float(), out["pixel_values"].float())


def test_images_of_pillow_may_be_grey_or_transparent():
    pillow = pytest.importorskip("PIL.Image")
    ours = build_resolution(ResolutionConfig("fixed", fixed=FixedConfig(4, "stretch")))
    assert ours(pillow.new("L", (4, 4), 7)).unique().tolist() == [7]
    assert ours(pillow.new("RGBA", (4, 4), (9, 9, 9, 0))).unique().tolist() == [255]


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_F132_grey_of_16_bits_keeps_its_shades(mode):
    """Pillow's own conversion makes white of all that is above 255 of 65535."""
    pillow = pytest.importorskip("PIL.Image")
    greys = [0, 255, 256, 20000, 32768, 65279, 65280, 65535, 1]
    order = "big" if mode.endswith("B") else "little"
    raw = b"".join(grey.to_bytes(4 if mode == "I" else 2, order) for grey in greys)
    ours = build_resolution(ResolutionConfig("fixed", fixed=FixedConfig(3, "stretch")))
    found = ours(pillow.frombytes(mode, (3, 3), raw))
    assert found[0, 1].flatten().tolist() == [grey // 256 for grey in greys]


def test_grey_without_a_range_is_rejected():
    pillow = pytest.importorskip("PIL.Image")
    ours = build_resolution(ResolutionConfig())
    for mode, value in (("F", 0.5), ("I", 70000)):
        with rejects("values", (value, value), "range"):
            ours(pillow.new(mode, (4, 4), value))


@pytest.mark.parametrize(
    ("make", "key", "value", "code"),
    [
        (lambda: ResolutionConfig("tile"), "name", "tile", "unknown"),
        (
            lambda: ResolutionConfig("fixed", budget=BudgetConfig(multiple=28)),
            *("budget.multiple", 28, "foreign"),
        ),
        (lambda: FixedConfig(fit="squeeze"), "fit", "squeeze", "unknown"),
        (lambda: TilesConfig(longest_edge=5000), "longest_edge", 5000, "size"),
        (lambda: TilesConfig(filter="box"), "filter", "box", "unknown"),
        (lambda: AspectTilesConfig(min_tiles=13), "min_tiles", 13, "order"),
        (lambda: BudgetConfig(max_pixels=9), "min_pixels", 65536, "order"),
        (lambda: BudgetConfig(min_pixels=1, max_pixels=9), "max_pixels", 9, "range"),
        (
            lambda: build_resolution(ResolutionConfig("budget")).layout(3, 700),
            *("image", (3, 700), "aspect"),
        ),
    ],
)
def test_impossible_arguments_are_rejected(make, key, value, code):
    with rejects(key, value, code):
        make()


@pytest.mark.parametrize("image", [torch.zeros(3, 8, 8), torch.zeros(8, 8, dtype=torch.uint8), 5])
def test_inputs_that_are_no_image_are_rejected(image):
    pytest.importorskip("PIL")
    with rejects("image", tuple(getattr(image, "shape", ())), "shape"):
        build_resolution(ResolutionConfig())(image)


def test_without_pillow_one_line_names_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    resolution = build_resolution(ResolutionConfig("tiles"))
    assert resolution.layout(100, 300).columns == 4  # counting needs none
    with rejects("", ..., "requires"):
        resolution(picture(4, 4))

"""Pictures of a source by each resolution: media, places, positions."""

import io
import json
import re

import pytest
import torch

from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from forge_vlm import SequencePlan  # noqa: E402
from forge_vlm.data import InvalidSample, VisionChatSource  # noqa: E402
from forge_vlm.resolution import BudgetConfig, ResolutionConfig, TilesConfig, build_resolution  # noqa: E402
from forge_vlm.vision.features import cut_patches  # noqa: E402

IMAGE = 257
TILES = {"name": "tiles", "tiles": {"tile_size": 8, "longest_edge": 24}}
BUDGET = {"name": "budget", "budget": {"multiple": 8, "min_pixels": 64, "max_pixels": 512}}
SIZES = [(24, 16), (7, 5), (9, 40)]


def noise(height, width):
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def talks(folder, **options):
    """A conversation of the first picture, one of none, and one of the other two."""
    lines = []
    for sizes in (SIZES[:1], [], SIZES[1:]):
        parts = [{"type": "text", "text": "see"}]
        for height, width in sizes:
            noise(height, width).save(folder / f"{height}.png")
            parts.append({"type": "image", "image": f"{height}.png"})
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes"}]
        lines.append(json.dumps({"messages": messages}))
    (folder / "t.jsonl").write_text("\n".join(lines))
    return VisionChatSource(folder / "t.jsonl", template="plain", **options)


def test_tiles_are_those_of_the_resolution(tmp_path):
    resolution = build_resolution(
        ResolutionConfig("tiles", tiles=TilesConfig(tile_size=8, longest_edge=24))
    )
    source = talks(tmp_path, resolution=TILES, tokens_per_tile=4)
    arrays = source.stream(1200, seed=1).arrays(np.arange(1))
    wanted, texts = [], []
    for height, width in SIZES:
        wanted.append(resolution(noise(height, width)))
        texts.append(resolution.text(resolution.layout(height, width), 4, "\0"))
    images = arrays["images"]
    assert torch.equal(images.values, torch.cat(wanted))
    assert images.row_offsets.tolist() == [0, sum(map(len, wanted))]
    found = bytes(0 if t == IMAGE else t for t in arrays["tokens"][0].tolist() if t != 256)
    joined = texts[0] + "yes" + "yes" + texts[1] + texts[2] + "yes"
    assert found.rstrip(b"\0").decode() == joined


def test_patches_under_a_budget(tmp_path):
    """Each picture has the tokens of its own size, and positions by row and column."""
    source = talks(
        tmp_path, resolution=BUDGET, positions="mrope", patch_size=4, merge=2, patch_time=2
    )
    arrays = source.stream(64).arrays(np.arange(1))
    config = BudgetConfig(multiple=8, min_pixels=64, max_pixels=512)
    resolution = build_resolution(ResolutionConfig("budget", budget=config))
    pairs = [cut_patches(resolution(noise(h, w)), 4, 2, 2) for h, w in SIZES]
    assert torch.equal(arrays["patches"].values, torch.cat([patches for patches, _ in pairs]))
    grids = torch.cat([grid for _, grid in pairs])
    assert torch.equal(arrays["grids"].values, grids)
    assert arrays["grids"].row_offsets.tolist() == [0, 3]
    assert (arrays["tokens"] == IMAGE).sum() == int(grids.prod(1).sum()) // 4
    tokens, documents = (torch.from_numpy(arrays[n]) for n in ("tokens", "document_ids"))
    of_tokens = [tuple(g) for g in (grids // torch.tensor([1, 2, 2])).tolist()]
    plan = SequencePlan.of(tokens, documents, {IMAGE: 1}, [of_tokens])
    assert np.array_equal(arrays["positions"], plan.positions("mrope").numpy())
    assert arrays["positions"].shape == (1, 3, 64)
    assert not np.array_equal(arrays["positions"][:, 0], arrays["positions"][:, 2])
    nothing = source.stream(64).arrays(np.arange(0))
    assert nothing["patches"].values.shape == (0, pairs[0][0].size(1))
    assert nothing["grids"].values.shape == (0, 3)


def test_positions_of_an_image_that_takes_one(tmp_path):
    options = {"resolution": {"fixed": {"size": 8}}, "tokens_per_tile": 4}
    source = talks(tmp_path, positions="text_preserving", **options)
    row = source.stream(64).arrays(np.arange(1))
    first = row["document_ids"][0] == 0
    assert row["positions"][0][first].tolist() == [0, 0, 0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("corrupt", ["raise", "mask", "skip"])
def test_damage_under_tiles(corrupt, tmp_path):
    """A picture without a header has no size: one square stands for it, or its sample is left out."""
    talks(tmp_path, resolution=TILES, tokens_per_tile=4)
    (tmp_path / "7.png").write_bytes(b"no picture")
    options = {"resolution": TILES, "tokens_per_tile": 4, "template": "plain", "corrupt": corrupt}
    if corrupt == "raise":
        with rejects("", ..., "damaged", InvalidSample, where="picture 0 (7.png)"):
            VisionChatSource(tmp_path / "t.jsonl", **options)
        return
    source = VisionChatSource(tmp_path / "t.jsonl", **options)
    stream = source.stream(1200)
    arrays = stream.arrays(np.arange(len(stream)))
    assert int((arrays["labels"] == ord("s")).sum()) == 2
    assert source.masked == (corrupt == "mask")
    assert len(source.lengths) == (3 if corrupt == "mask" else 2)
    assert (arrays["tokens"] == IMAGE).sum() == 4 * len(arrays["images"].values)
    numbers = [re.findall("[0-9]+", warning) for warning in stream.warnings]
    assert numbers == ([["1", "3"]] if corrupt == "skip" else [])


def test_an_image_that_changes_is_read_again(tmp_path):
    source = talks(tmp_path, resolution=TILES, tokens_per_tile=4, pack=False)
    noise(24, 80).save(tmp_path / "24.png")
    with rejects("sample", code="changed", kind=InvalidSample):
        source.stream(1200).arrays(np.arange(3))


def test_images_are_rotated_upright(tmp_path):
    """A camera says in EXIF how it was held, and a processor turns its picture."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    noise(8, 24).save(file, "JPEG", exif=exif)
    source = talks(tmp_path, resolution=TILES, tokens_per_tile=4)
    layout = source.decoder.pictures.layout(file.getvalue(), "a")
    assert layout == source.decoder.pictures.resolution.layout(24, 8)
    assert (
        len(source.decoder.pictures.media(file.getvalue(), layout, "a")["images"])
        == layout.num_tiles
    )


def test_headers_are_enough_for_the_length_of_a_sample(tmp_path, monkeypatch):
    talks(tmp_path, resolution=TILES, tokens_per_tile=4)

    def load(image):
        raise AssertionError("pixels were read")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    talks_again = VisionChatSource(
        tmp_path / "t.jsonl", template="plain", resolution=TILES, tokens_per_tile=4
    )
    assert len(talks_again.lengths) == 3

"""Kinds of images x EXIF orientations x resolutions, against pixels that are turned by numpy and resized plainly."""

import io
import struct
import zlib

import pytest
import torch

from forge_testing.problems import rejects

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from forge_vlm.data import InvalidSample  # noqa: E402
from forge_vlm.data.images import ImageProcessor  # noqa: E402
from forge_vlm.data.records import Caps  # noqa: E402
from forge_vlm.resolution import (  # noqa: E402
    AspectTilesConfig,
    BudgetConfig,
    FixedConfig,
    ResolutionConfig,
    TilesConfig,
    build_resolution,
)
from forge_vlm.vision.features import cut_patches  # noqa: E402

pytestmark = pytest.mark.lane("test")

ORIENTATION = 0x0112
SIDE = 8
MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK"),
    "TIFF": ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P"),
    "BMP": ("L", "P", "RGB"),
}
KINDS = [(format, mode) for format, modes in MODES.items() for mode in modes]
POLICIES = {
    **{
        f"fixed {fit}": ResolutionConfig(fixed=FixedConfig(SIDE, fit, "bilinear"))
        for fit in ("pad", "stretch", "crop")
    },
    "tiles": ResolutionConfig("tiles", tiles=TilesConfig(SIDE, 24)),
    "aspect_tiles": ResolutionConfig("aspect_tiles", aspect_tiles=AspectTilesConfig(SIDE)),
    "budget": ResolutionConfig("budget", budget=BudgetConfig(SIDE, 256, 1024)),
}
#: How numpy stores pixels upright that lie as an orientation says.
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).swapaxes(0, 1),
    8: np.rot90,
}


def image_of(mode):
    """12 x 28 pixels of a mode; where there is alpha, it is none or all."""
    noise = np.random.default_rng(7).integers(0, 256, (12, 28, 4), dtype=np.uint8)
    if mode == "I;16":
        return Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    if mode == "P":
        image = Image.fromarray(noise[..., 0] % 16, "P")
        image.putpalette(noise[:4].tobytes()[:48])
        return image
    if mode in ("LA", "RGBA"):
        noise[..., 3] = noise[..., 3] // 128 * 255
        found = Image.fromarray(noise, "RGBA")
        return found if mode == "RGBA" else found.convert("LA")
    return Image.fromarray(noise, "CMYK") if mode == "CMYK" else Image.fromarray(noise[..., :3]).convert(mode)  # fmt: skip


def encoded(format, mode, orientation):
    exif, file = Image.Exif(), io.BytesIO()
    exif[ORIENTATION] = orientation
    options = {"exif": exif} if format not in ("GIF", "BMP") else {}
    image_of(mode).save(file, format, **options, **({"lossless": True} if format == "WEBP" else {}))
    return file.getvalue()


def pixels_of(format, mode, orientation):
    """(H, W, 3) of the image as it is to be seen."""
    image = Image.open(io.BytesIO(encoded(format, mode, 1)))
    if mode == "I;16":
        pixels = np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, 2)
    elif "A" in mode:
        both = np.asarray(image.convert("RGBA"))
        pixels = np.where(both[..., 3:] > 0, both[..., :3], 255).astype(np.uint8)
    else:
        pixels = np.asarray(image.convert("RGB"))
    turned = UPRIGHT[1 if format in ("GIF", "BMP") else orientation](pixels)
    return np.ascontiguousarray(turned)


def plainly(pixels, policy, layout):
    """(N, H, W, 3): one resize to the size of all tiles, or what a policy does before it."""
    image, config = Image.fromarray(pixels), POLICIES[policy]
    filter = Image.Resampling[getattr(config, config.name).filter.upper()]
    wide, tall = image.size
    if policy == "budget":
        return np.asarray(image.resize((layout.width, layout.height), filter))[None]
    if policy == "fixed pad":
        side = max(image.size)
        square = Image.new("RGB", (side, side), (127, 127, 127))
        square.paste(image, ((side - wide) // 2, (side - tall) // 2))
        image = square
    if policy == "fixed crop":
        wide, tall = (int(SIDE * side / min(image.size)) for side in image.size)
        left, top = (wide - SIDE) // 2, (tall - SIDE) // 2
        image = image.resize((wide, tall), filter).crop((left, top, left + SIDE, top + SIDE))
    if policy == "tiles":
        scaled = [round(side * 24 / max(image.size)) for side in image.size]
        image = image.resize([side + side % 2 for side in scaled], filter)
    whole = image.resize((SIDE, SIDE), filter)
    tiles = []
    if layout.rows:
        image = image.resize((layout.columns * SIDE, layout.rows * SIDE), filter)
        whole = image.resize((SIDE, SIDE), filter) if policy == "tiles" else whole
        rows = np.split(np.asarray(image), layout.rows)
        tiles = [tile for row in rows for tile in np.split(row, layout.columns, 1)]
    return np.stack([*tiles, np.asarray(whole)])


def check(format, mode, orientation, policy):
    pictures = ImageProcessor(POLICIES[policy], 1, "<image>", patch_size=4)
    content = encoded(format, mode, orientation)
    pixels = pixels_of(format, mode, orientation)
    layout = pictures.layout(content, "a")
    assert layout == pictures.resolution.layout(*pixels.shape[:2])
    wanted = torch.tensor(plainly(pixels, policy, layout)).permute(0, 3, 1, 2)
    found = pictures.media(content, layout, "a")
    if policy == "budget":
        assert torch.equal(found["patches"], cut_patches(wanted, 4, 2, 2)[0])
    else:
        assert torch.equal(found["images"], wanted)


def test_F167_images_are_oriented_by_exif_each_pair():
    """Each two of kind, orientation and resolution meet."""
    for k, kind in enumerate(KINDS):
        for orientation in UPRIGHT:
            check(*kind, orientation, [*POLICIES][(k + orientation) % len(POLICIES)])


def late_exif():
    """A PNG whose eXIf chunk stands after its pixels."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    chunk = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    plain = io.BytesIO()
    image_of("RGB").save(plain, "PNG")
    return plain.getvalue()[:-12] + chunk + plain.getvalue()[-12:]


def of_xmp():
    """A TIFF whose orientation stands in XMP alone."""
    file = io.BytesIO()
    image_of("RGB").save(file, "TIFF", tiffinfo={700: b'<x tiff:Orientation="6"/>'})
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "orientation"),
    [
        (late_exif, 6),
        (of_xmp, 6),
        (lambda: encoded("JPEG", "RGB", 9), 1),
        (lambda: encoded("JPEG", "RGB", 0), 1),
    ],
    ids=["PNG with late EXIF", "TIFF with XMP", "orientation 9", "orientation 0"],
)
def test_F167_orientations_in_rare_headers(content, orientation):
    pictures = ImageProcessor(POLICIES["budget"], 1, "<image>", patch_size=4)
    layout = pictures.layout(content(), "a")
    wide = pictures.resolution.layout(12, 28)
    assert layout == (wide if orientation == 1 else pictures.resolution.layout(28, 12))
    assert len(pictures.media(content(), layout, "a")["patches"])


@pytest.mark.slow
@pytest.mark.parametrize("format", MODES)
def test_F167_images_are_oriented_by_exif_full_grid(format):
    for mode in MODES[format]:
        for orientation in UPRIGHT:
            for policy in POLICIES:
                check(format, mode, orientation, policy)


@pytest.mark.parametrize("fit", ["pad", "crop", "stretch"])
@pytest.mark.parametrize("size", [(1, 16000), (16000, 1)])
def test_F168_extreme_aspects_take_little_memory(fit, size):
    """Pillow allocates 16 MiB at a time; a square of 16,000 pixels would be 1 GB."""
    resolution = build_resolution(ResolutionConfig(fixed=FixedConfig(336, fit)))
    image = Image.new("RGB", size, (200, 100, 50))
    Image.core.reset_stats()
    found = resolution(image)
    stats = Image.core.get_stats()
    assert stats["allocated_blocks"] + stats["reused_blocks"] < 16
    middle = found[0, :, 168, 168].tolist()
    assert middle == [200, 100, 50] if fit != "pad" else 100 < middle[0] <= 200


def test_F168_crops_of_extreme_aspects_are_those_of_their_middle(monkeypatch):
    """With and without the pixels that are cropped, of a size where both are possible."""
    noise = np.random.default_rng(1).integers(0, 256, (7, 500, 3), dtype=np.uint8)
    image, resolution = Image.fromarray(noise), build_resolution(POLICIES["fixed crop"])
    slow = resolution(image)
    monkeypatch.setattr("forge_vlm.resolution.policies._MOST", 0)
    for turned in (image, image.transpose(Image.Transpose.TRANSPOSE)):
        fast = resolution(turned)
        fast = fast if turned is image else fast.mT
        assert (fast.int() - slow.int()).abs().max() <= 1


def test_F168_bounds_of_a_record_are_bounded():
    """A record may ask for more pixels than its image has, up to those that an image may have."""
    pictures = ImageProcessor(POLICIES["budget"], 1, "<image>", patch_size=4)
    content = encoded("PNG", "L", 1)
    assert pictures.layout(content, "a", Caps(2**18, 2**20)).height > 256
    with rejects("", code="pixels", kind=InvalidSample, where="a"):
        pictures.layout(content, "a", Caps(2**35, 2**36))

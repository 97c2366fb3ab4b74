"""Bounds of pixels that a record gives for one of its pictures: sizes, tokens, files, streams, prompts, and what is refused."""

import importlib
import itertools
import json

import pytest
import torch

from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from test_prepare import same_rows  # noqa: E402

from forge_vlm.data import InvalidSample, Prompts, VisionChatSource  # noqa: E402
from forge_vlm.data.command import main  # noqa: E402
from forge_vlm.data.index import lengths_entry  # noqa: E402
from forge_vlm.data.prepared import Prepared  # noqa: E402
from forge_vlm.data.source import options_of  # noqa: E402
from forge_vlm.data.streaming import StreamedSource  # noqa: E402

SIDE = 8  # of a token: patches of 4, two by two
LEAST, MOST = 256, 4096
OPTIONS = {
    "template": "plain",
    "positions": "mrope",
    "patch_size": 4,
    "resolution": {
        "name": "budget",
        "budget": {"multiple": SIDE, "min_pixels": LEAST, "max_pixels": MOST},
    },
}
SIZES = [(20, 30), (9, 90), (64, 64), (150, 40), (333, 210)]
CAPS = [
    {},
    {"max_pixels": 1024},
    {"min_pixels": 2048},
    {"min_pixels": 64, "max_pixels": 400},
    {"min_pixels": 8000, "max_pixels": 9000},
]
CASES = [*itertools.product(SIZES, CAPS)]


def write(folder, cases, name="talks.jsonl"):
    """A conversation of a picture for each size and its bounds."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for (height, width), caps in cases:
        pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{height}.png")
        parts = [{"type": "image", "image": f"{height}.png", **caps}, {"type": "text", "text": "?"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes"}]
        lines.append(json.dumps({"messages": messages}))
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


def wanted_sizes(cases):
    """Of transformers' processor with the bounds of each picture in place of those of the source."""
    pytest.importorskip("transformers")
    module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    bounds = {"min_pixels": LEAST, "max_pixels": MOST}
    return [module.smart_resize(*size, factor=SIDE, **{**bounds, **caps}) for size, caps in cases]


def test_sizes_and_tokens_are_those_of_transformers(tmp_path):
    source = VisionChatSource(write(tmp_path, CASES), **OPTIONS)
    wanted = wanted_sizes(CASES)
    assert len(set(wanted)) > len(set(wanted_sizes([(size, {}) for size in SIZES])))
    for number, (height, width) in enumerate(wanted):
        sample = source.sample(number)
        (layout,) = sample.layouts
        assert (layout.height, layout.width) == (height, width)
        tokens = int((sample.tokens == source.image_id).sum())
        assert tokens == height * width // SIDE**2
        (media,), good = source.media(sample)
        assert good
        assert media["grids"].tolist() == [[1, height // 4, width // 4]]
        assert len(media["patches"]) == 4 * tokens


def test_bounds_are_part_of_lengths_and_fingerprint(tmp_path):
    first, other = (
        VisionChatSource(write(tmp_path / name, [(SIZES[0], caps)]), **OPTIONS)
        for name, caps in (("a", {}), ("b", {"max_pixels": 1024 // 4}))
    )
    assert first.lengths.tolist() != other.lengths.tolist()
    assert first.fingerprint() != other.fingerprint()
    entries = {lengths_entry(None, s.content, s.options) for s in (first, other)}
    assert len(entries) == 2


@pytest.mark.parametrize("pictures", ["copy", "name"])
def test_a_prepared_folder_keeps_them(tmp_path, pictures):
    path = write(tmp_path / "a", CASES)
    arguments = ["prepare", str(path), "--output", str(tmp_path / "out"), "--pictures", pictures]
    plain = {k: v for k, v in OPTIONS.items() if k != "resolution"} | {"resolution.name": "budget"}
    budget = OPTIONS["resolution"]["budget"]
    for key, value in (plain | {f"resolution.budget.{k}": v for k, v in budget.items()}).items():
        arguments += ["--option", f"{key}={value}"]
    assert main(arguments) == 0
    same_rows(VisionChatSource(path, **OPTIONS), Prepared(tmp_path / "out"))
    write(tmp_path / "b", [(SIZES[0], {})])
    arguments[1], arguments[3] = str(tmp_path / "b/talks.jsonl"), str(tmp_path / "plain")
    assert main(arguments) == 0
    assert not (tmp_path / "plain/caps.bin").exists()


def test_a_stream_reads_them(tmp_path):
    path = write(tmp_path, CASES)
    options = options_of(str(path), {**OPTIONS, "pack": False})
    rows = StreamedSource(str(path), options, virtual_shards=1, shuffle_window=1).stream(200)
    found = rows.arrays(np.arange(len(CASES)))["grids"].values.tolist()
    wanted = [[1, height // 4, width // 4] for height, width in wanted_sizes(CASES)]
    assert sorted(found) == sorted(wanted)  # a shard begins anywhere


def test_prompts_read_them(tmp_path):
    prompts = Prompts(**{k: v for k, v in OPTIONS.items() if k != "positions"})
    asked = prompts.read(write(tmp_path, CASES))
    wanted = wanted_sizes(CASES)
    for prompt, (height, width) in zip(asked, wanted, strict=True):
        assert (prompt.tokens == prompts.tokens.image_id).sum() == height * width // SIDE**2
    grids = prompts.media(asked)["grids"]
    assert torch.equal(grids, torch.tensor([[1, h // 4, w // 4] for h, w in wanted]))


def test_a_set_saved_by_datasets_has_them(tmp_path):
    datasets = pytest.importorskip("datasets")
    image = Image.new("RGB", (64, 64), (9, 9, 9))
    parts = [
        {"type": "image", "text": None, "max_pixels": 1024},
        {"type": "image", "text": None, "max_pixels": None},
        {"type": "text", "text": "?", "max_pixels": None},
    ]
    answer = [{"type": "text", "text": "yes", "max_pixels": None}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    rows = {"images": [[image, image]], "messages": [talk]}
    column = datasets.List(datasets.Image())
    datasets.Dataset.from_dict(rows).cast_column("images", column).save_to_disk(tmp_path / "set")
    source = VisionChatSource(tmp_path / "set", format="dataset", **OPTIONS)
    assert [(x.height, x.width) for x in source.sample(0).layouts] == [(32, 32), (64, 64)]


@pytest.mark.parametrize("corrupt", ["raise", "mask", "skip"])
@pytest.mark.parametrize(
    ("caps", "key", "value", "code"),
    [
        ({"max_pixels": 0}, "max_pixels", 0, "size"),
        ({"min_pixels": 1.5}, "min_pixels", 1.5, "size"),
        ({"max_pixels": True}, "max_pixels", True, "size"),
        ({"max_pixels": 100}, "min_pixels", 256, "order"),
        ({"min_pixels": 2, "max_pixels": 63}, "max_pixels", 63, "range"),
    ],
)
def test_bounds_that_no_image_can_have_are_rejected(tmp_path, caps, key, value, code, corrupt):
    path = write(tmp_path, [(SIZES[0], {}), (SIZES[1], caps)])
    with rejects(key, value, code, InvalidSample, where="talks.jsonl, record 1, picture 0"):
        VisionChatSource(path, corrupt=corrupt, **OPTIONS)


def test_bounds_mean_nothing_elsewhere(tmp_path):
    path = write(tmp_path, [(SIZES[0], {"max_pixels": 512})])
    square = {"resolution": {"fixed": {"size": 8}}, "tokens_per_tile": 4, "template": "plain"}
    with rejects("max_pixels", 512, "foreign", InvalidSample, where="record 0, "):
        VisionChatSource(path, **square)
    path.write_text(path.read_text().replace('"image"', '"video"'))
    with rejects("max_pixels", 512, "video", InvalidSample, where="record 0, video 0"):
        VisionChatSource(path, **OPTIONS)

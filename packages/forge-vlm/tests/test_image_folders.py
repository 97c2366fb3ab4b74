"""Where the images of records are: links, the option `images`, COCO's own layout, URLs, empty values."""

import json
import os
from types import SimpleNamespace

import pytest

from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

pytest.importorskip("numpy")
pytest.importorskip("PIL")

from data_files import NAMES, OPTIONS, coco, folder_of_csv, llava, picture_files, png  # noqa: E402

from forge_vlm.data import InvalidSample, Prompts, VisionChatSource  # noqa: E402
from forge_vlm.data.formats import open_records  # noqa: E402
from forge_vlm.data.prepare import prepare  # noqa: E402
from forge_vlm.data.prepared import Prepared  # noqa: E402
from forge_vlm.data.source import open_source, options_of  # noqa: E402
from forge_vlm.data.streaming import Chunks  # noqa: E402
from forge_vlm.data.video import Clip  # noqa: E402

RED, ASK = "p/red.png", {"type": "text", "text": "what?"}


def talk(part, **keys):
    content = [part, ASK] if isinstance(part, dict) else part
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "it"}]
    return json.dumps({"messages": messages, **keys})


def turns(text, **keys):
    said = [{"from": "human", "value": text}, {"from": "gpt", "value": "it"}]
    return json.dumps({"conversations": said, **keys})


def image(value, key="image"):
    return {"type": "image", key: value}


def chat(folder):
    picture_files(folder)
    (folder / "a.jsonl").write_text("\n".join(talk(image(f"p/{name}.png")) for name in NAMES))
    return folder / "a.jsonl"


def named(folder):
    """A table that names its images, as `datasets` keeps those that it did not embed."""
    datasets = pytest.importorskip("datasets")
    picture_files(folder)
    images = [{"bytes": None, "path": f"p/{name}.png"} for name in NAMES]
    return datasets.Dataset.from_dict({"image": images, "text": NAMES})


def parquet(folder):
    named(folder).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def saved(folder):
    named(folder).save_to_disk(folder / "set")
    return folder / "set"


WRITERS = {
    "chat": chat, "llava": llava, "coco": coco, "coco_trees": coco,
    "folder": folder_of_csv, "parquet": parquet, "dataset": saved,
}  # fmt: skip


def images_of(records):
    return [record.pictures[0].read() for record in records]


@pytest.mark.parametrize("format", WRITERS)
def test_F173_images_of_each_format_may_lie_in_a_folder_of_their_own(format, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = WRITERS[format](tmp_path / "a")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a/p").rename(tmp_path / "elsewhere/p")
    wanted = [png(name) for name in NAMES]
    assert images_of(open_records(format, path, images="~/elsewhere")) == wanted
    missing = open_records(format, path)[0].pictures[0]
    with rejects("", ..., "unreadable", InvalidSample):
        missing.read()
    own = path if format in ("folder", "dataset") else path.parent
    (own / "p").symlink_to(tmp_path / "elsewhere/p")
    assert images_of(open_records(format, path)) == wanted


def test_F173_the_folder_of_images_is_known_to_all_that_read_records(tmp_path):
    path = chat(tmp_path / "a")
    (tmp_path / "a/p").rename(tmp_path / "p")
    options = {**OPTIONS, "images": str(tmp_path), "corrupt": "skip"}
    direct = VisionChatSource(path, **options)
    assert len(direct.lengths) == len(NAMES)
    assert len(Prompts(**options).read(path)) == len(NAMES)
    config = SimpleNamespace(path=str(path))
    streamed = open_source(config, **options, streaming=True)
    assert images_of(streamed.pieces.open(0)) == [png(name) for name in NAMES]
    prepare(path, tmp_path / "out", options_of("", options))
    for given in ({}, {"images": str(tmp_path)}):
        assert len(Prepared(tmp_path / "out", **given).lengths) == len(NAMES)
    with rejects("images", "b", "mismatch"):
        Prepared(tmp_path / "out", images="b")
    (tmp_path / "p").rename(tmp_path / "a/p")
    before = VisionChatSource(path, **{**options, "images": None})
    assert direct.fingerprint() == before.fingerprint()  # a set may be moved


def test_F173_a_folder_of_images_must_be_one(tmp_path):
    path = chat(tmp_path)
    for value in (7, ""):
        with rejects("images", value, "type"):
            VisionChatSource(path, **OPTIONS, images=value)
    for call in (open_records, lambda *a, images: Chunks(*a, 1, images=images)):
        with rejects("images", str(path), "not_folder", InvalidSample):
            call("chat", path, images=str(path))


def test_F173_the_cache_of_hugging_face_is_read(tmp_path):
    """Each file of a snapshot is a link to a blob."""
    chat(tmp_path / "made")
    snapshot, blobs = tmp_path / "snapshots/1", tmp_path / "blobs"
    (snapshot / "p").mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(["a.jsonl", *(f"p/{name}.png" for name in NAMES)]):
        (tmp_path / "made" / file).rename(blobs / str(number))
        (snapshot / file).symlink_to(os.path.relpath(blobs / str(number), (snapshot / file).parent))
    assert images_of(open_records("chat", snapshot / "a.jsonl")) == [png(name) for name in NAMES]


@pytest.mark.parametrize(
    "given", ["../x.png", "p/../../x.png", "link/../../x.png", "{root}/x.png", "{root}/a/../x.png"]
)
def test_F173_a_path_of_a_record_stays_in_its_folder(given, tmp_path):
    given = given.format(root=tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "x.png").write_bytes(png("red"))
    (tmp_path / "a/link").symlink_to(tmp_path)
    (tmp_path / "a/a.jsonl").write_text(talk(image(given)))
    for images in (None, str(tmp_path / "a")):
        with rejects("path", given, "outside", InvalidSample, where="record 0"):
            open_records("chat", tmp_path / "a/a.jsonl", images=images)[0]


def test_F173_a_path_goes_back_by_name_not_through_a_link(tmp_path):
    (tmp_path / "far/inner").mkdir(parents=True)
    (tmp_path / "far/x.png").write_bytes(png("blue"))
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.png").write_bytes(png("red"))
    (tmp_path / "a/link").symlink_to(tmp_path / "far/inner")
    (tmp_path / "a/a.jsonl").write_text(talk(image("link/../x.png")))
    assert images_of(open_records("chat", tmp_path / "a/a.jsonl")) == [png("red")]


@pytest.mark.parametrize("format", ["coco", "coco_trees"])
@pytest.mark.parametrize("folder", ["val2017", "images", "images/val2017", "annotations/val2017"])
def test_F173_coco_is_read_as_it_is_laid_out(format, folder, tmp_path):
    (tmp_path / "annotations").mkdir()
    path = coco(tmp_path / "made").rename(tmp_path / "annotations/captions_val2017.json")
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "made/p").rename(tmp_path / folder / "p")
    wanted = [png(name) for name in NAMES]
    assert images_of(open_records(format, path)) == wanted
    path = path.rename(tmp_path / "made/captions_val2017.json")
    for images in {tmp_path / folder, tmp_path / folder.removesuffix("val2017")}:
        assert images_of(open_records(format, path, images=images)) == wanted


@pytest.mark.parametrize(
    "record",
    [
        talk(image("http://a.b/c.png")),
        talk(image("http://a.b/c.png", "url")),
        talk({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}),
        talk("<image>?", images=[{"url": "s3://a/c.png"}]),
        turns("<image>?", image="file:///c.png"),
    ],
)
def test_F173_a_url_is_not_downloaded(record, tmp_path):
    (tmp_path / "a.jsonl").write_text(record + "\n" + talk("hello"))
    format = "llava" if "conversations" in record else "chat"
    picture = open_records(format, tmp_path / "a.jsonl")[0].pictures[0]
    with rejects("", ..., "url", InvalidSample, where="record 0"):
        picture.read()
    if format == "chat":  # as a file that is missing
        assert len(VisionChatSource(tmp_path / "a.jsonl", corrupt="skip", **OPTIONS).lengths) == 1


def test_F173_a_url_of_a_video_is_not_downloaded(tmp_path):
    pytest.importorskip("av")
    video = {"type": "video", "video": "https://a.b/c.mp4"}
    (tmp_path / "a.jsonl").write_text(talk(video))
    with rejects("", ..., "url", InvalidSample, where="record 0"):
        Clip(open_records("chat", tmp_path / "a.jsonl")[0].pictures[0])


@pytest.mark.parametrize(
    ("record", "images"),
    [
        (talk("?", image=""), 0),
        (talk("?", images=[None]), 0),
        (talk("?", images=[""]), 0),
        (talk("?", images=[{"bytes": None, "path": None}]), 0),
        (talk(image(RED), images=[None]), 1),
        (talk(image(RED, "url")), 1),
        (talk(image(RED, "path")), 1),
        (talk("?", images=[{"url": RED}]), 1),
        (turns("?", image=""), 0),
        (turns("?", image=[None]), 0),
        (turns("<image>?", image=RED, video=None), 1),
    ],
)
def test_F173_empty_values_are_no_images_and_paths_have_several_keys(record, images, tmp_path):
    picture_files(tmp_path)
    (tmp_path / "a.jsonl").write_text(record)
    format = "llava" if "conversations" in record else "chat"
    found = open_records(format, tmp_path / "a.jsonl")[0].pictures
    assert [picture.read() for picture in found] == [png("red")] * images


@pytest.mark.parametrize("part", [{"type": "image"}, image(""), image(None), {"type": "video"}])
def test_F173_a_part_without_a_value_is_named(part, tmp_path):
    (tmp_path / "a.jsonl").write_text(talk(part))
    with rejects("content", part, "no_value", InvalidSample, where="record 0"):
        open_records("chat", tmp_path / "a.jsonl")[0]

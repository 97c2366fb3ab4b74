"""Files of others: formats that start programs, bombs, pipes, names of the shape of patterns."""

import io
import json
import os

import pytest

from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from forge_vlm.data import InvalidSample, Prompts  # noqa: E402
from forge_vlm.data.formats import open_records  # noqa: E402
from forge_vlm.data.images import FORMATS  # noqa: E402
from forge_vlm.data.prepare import prepare  # noqa: E402
from forge_vlm.data.prepared import Prepared, is_prepared  # noqa: E402
from forge_vlm.data.records import EncodedImage, Video  # noqa: E402
from forge_vlm.data.source import VisionChatSource, options_of  # noqa: E402
from forge_vlm.data.streaming import Chunks  # noqa: E402
from forge_vlm.data.tokenizer import open_tokenizer  # noqa: E402
from forge_vlm.data.video import Clip  # noqa: E402

OPTIONS = dict(
    resolution={"name": "tiles", "tiles": {"tile_size": 8, "longest_edge": 16}}, tokens_per_tile=4
)
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def encoded(size, format="PNG"):
    file = io.BytesIO()
    Image.new("RGB", size, (9, 8, 7)).save(file, format)
    return file.getvalue()


def talk(folder, content):
    """A conversation about one picture."""
    (folder / "a.png").write_bytes(content)
    asked = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
    record = {"messages": [asked, {"role": "assistant", "content": "this"}]}
    (folder / "talks.jsonl").write_text(json.dumps(record))
    return folder / "talks.jsonl"


def test_F190_an_image_in_postscript_starts_no_program(tmp_path, monkeypatch):
    def started(*_, **__):
        raise AssertionError("Ghostscript")

    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", started)
    Image.preinit()
    with rejects("", ..., "damaged", InvalidSample, where="a.png"):
        VisionChatSource(talk(tmp_path, POSTSCRIPT), **OPTIONS)


@pytest.mark.parametrize("format", FORMATS)
def test_images_of_each_listed_format_are_read(tmp_path, format):
    try:
        content = encoded((16, 8), format)
    except (KeyError, OSError):
        pytest.skip(f"pillow was built without {format}")
    pixels = VisionChatSource(talk(tmp_path, content), **OPTIONS).sample(0)
    assert [(layout.height, layout.width) for layout in pixels.layouts] == [(8, 8)]


def test_F190_images_have_limits_of_pixels_and_bytes(tmp_path):
    path, size = talk(tmp_path, encoded((100, 100))), (tmp_path / "a.png").stat().st_size
    for limits, value, code in (
        ({"max_image_pixels": 9999}, 10000, "pixels"),
        ({"max_image_bytes": size - 1}, size, "length"),
    ):
        with rejects("", value, code, InvalidSample, where="a.png"):
            VisionChatSource(path, **OPTIONS, **limits)
        with rejects("", value, code, InvalidSample, where="a.png"):
            Prompts(**OPTIONS, **limits).read(path)
        reader = VisionChatSource(path, **OPTIONS | limits | {"corrupt": "mask"}).reader
        sample, good = reader.sample(open_records("chat", path)[0])
        assert not good
        assert reader.media(sample)[1] is False
    whole = {"max_image_pixels": 10000, "max_image_bytes": size}
    read, default = VisionChatSource(path, **OPTIONS, **whole), VisionChatSource(path, **OPTIONS)
    assert read.sample(0).layouts == default.sample(0).layouts
    assert "max_image_pixels" not in default.reader.identity  # older fingerprints hold
    for key in whole:
        for value in (0, 1.5, True):
            with rejects(key, value, "size"):
                VisionChatSource(path, **OPTIONS | {key: value})


def test_F149_prepared_folders_of_such_paths_and_of_before_the_limits(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a[1]").mkdir()
    talk(tmp_path / "a[1]", encoded((8, 8)))
    prepare("~/a[1]/talks.jsonl", "~/a[1]/out", options_of("", OPTIONS))
    assert is_prepared("~/a[1]/out")
    manifest = tmp_path / "a[1]/out/prepared.json"
    about = json.loads(manifest.read_text())
    for key in ("max_image_pixels", "max_image_bytes"):
        del about["given"][key]
    manifest.write_text(json.dumps(about))
    assert Prepared("~/a[1]/out").sample(0).layouts
    with rejects("max_image_pixels", 7, "mismatch"):
        Prepared("~/a[1]/out", max_image_pixels=7)


def test_F190_images_are_regular_files_of_a_bounded_size(tmp_path):
    os.mkfifo(tmp_path / "fifo.png")
    with (tmp_path / "sparse.png").open("wb") as file:
        file.truncate(20 << 30)
    for name, value, code in (("fifo.png", ..., "not_a_file"), ("sparse.png", 20 << 30, "length")):
        with rejects("", value, code, InvalidSample, where="the picture"):
            EncodedImage("the picture", tmp_path / name).read()


def test_F172_a_pipe_as_a_source_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metadata.csv")
    with rejects("", ..., "not_a_file", InvalidSample, where=tmp_path / "metadata.csv"):
        open_records("videos", tmp_path)


def test_F172_a_pipe_among_chunks_videos_and_tokenizers_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "b.jsonl")
    (tmp_path / "a.jsonl").write_text("{}\n")
    with rejects("", ..., "not_a_file", InvalidSample, where=tmp_path / "b.jsonl"):
        Chunks("chat", tmp_path, 1)
    pytest.importorskip("tokenizers")
    with rejects("tokenizer", str(tmp_path / "b.jsonl"), "unreadable"):
        open_tokenizer(str(tmp_path / "b.jsonl"), "x", "<image>")
    pytest.importorskip("av")
    with rejects("", ..., "not_a_file", InvalidSample, where="clip"):
        Clip(Video("clip", tmp_path / "b.jsonl"))


@pytest.mark.parametrize("name", ["a[1]", "~x", "$HOME", "a*"])
def test_F149_paths_are_literal_but_for_a_leading_tilde(tmp_path, name, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for folder in (name, "a1"):
        (tmp_path / folder).mkdir()
        path = talk(tmp_path / folder, encoded((8, 8)))
    path = f"~/{name}/talks.jsonl"
    assert len(open_records("chat", path)) == len(Chunks("chat", f"~/{name}", 1)) == 1
    assert len(open_records("chat", f"{name}/talks.jsonl")) == 1


def test_F149_parquet_and_saved_sets_of_names_that_the_library_expands(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    for name in ("a[1]", "a1", "~x"):
        rows = {"caption": [f"in {name}"], "image": [{"bytes": encoded((8, 8)), "path": None}]}
        data = datasets.Dataset.from_dict(rows)
        data.save_to_disk(tmp_path / "saved")
        (tmp_path / "saved").rename(tmp_path / name)
        data.to_parquet(tmp_path / name / "part[1].parquet")
    for name in ("a[1]", "~x"):
        for format, path in (("dataset", name), ("parquet", name), ("parquet", f"{name}/part[1].parquet")):  # fmt: skip
            (record,) = open_records(format, path)
            assert record.messages[1].parts == (f"in {name}",)
    (tmp_path / "a1").rename(tmp_path / "a1::b")
    for format in ("dataset", "parquet"):
        with rejects("path", str(tmp_path / "a1::b"), "chain", InvalidSample):
            open_records(format, tmp_path / "a1::b")
    monkeypatch.setenv("V", "~x")
    (tmp_path / "a1::b").rename(tmp_path / "$V")
    with rejects("path", str(tmp_path / "$V"), "variable", InvalidSample):
        open_records("parquet", tmp_path / "$V")
    (record,) = open_records("dataset", tmp_path / "$V")
    assert record.messages[1].parts == ("in a1",)

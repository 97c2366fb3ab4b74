"""Formats of samples with pictures x damages: what is read is what was written, or there is one problem with key and code.

References are the standard library and pyarrow on the same bytes, and rules: a tar whose members end early is an error. The
quick lane takes cells in which each pair of format, compression, damage and place occurs.
"""

import contextlib
import csv
import functools
import io
import json
import tarfile
import tempfile
from itertools import product
from pathlib import Path

import pytest

from forge_testing import damages
from forge_testing.damages import BYTES, ENCODINGS, FILES, PACKERS, as_user, covering, write_damaged
from forge_testing.problems import assert_problem

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from data_files import png  # noqa: E402

from forge_vlm.data import InvalidSample  # noqa: E402
from forge_vlm.data.formats import open_records  # noqa: E402
from forge_vlm.data.streaming import Chunks  # noqa: E402

TEXTS = [f"text {i} é, said" for i in range(40)]
MORE = ["one more", "and another"]  # of a sound file of the same folder
RED = png("red")


# ---- sound files


def turns(text):
    return [{"role": "user", "content": [{"type": "image", "image": "red.png"}]}, {"role": "assistant", "content": text}]  # fmt: skip


def asks(text):
    said = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": text}]
    return {"image": "red.png", "conversations": said}


def captions(texts):
    notes = [{"image_id": 1, "caption": text} for text in texts]
    return {"images": [{"id": 1, "file_name": "red.png"}], "annotations": notes}


def table(texts):
    file = io.StringIO(newline="")
    rows = [("file_name", "text"), *(("red.png", text) for text in texts)]
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


#: format -> name of its file, and the content of that.
CONTENT = {
    "chat": ("a.jsonl", lambda texts: lines({"messages": turns(text)} for text in texts)),
    "llava lines": ("a.jsonl", lambda texts: lines(map(asks, texts))),
    "llava": ("a.json", lambda texts: json.dumps([*map(asks, texts)], ensure_ascii=False)),
    "coco": ("a.json", lambda texts: json.dumps(captions(texts), ensure_ascii=False)),
    "folder": ("metadata.csv", table),
    "folder lines": ("metadata.jsonl", lambda texts: lines({"file_name": "red.png", "text": text} for text in texts)),
}  # fmt: skip
STREAMED = {"chat streamed": "chat", "webdataset streamed": "webdataset"}
FORMATS = (*CONTENT, "parquet", "dataset", "webdataset", *STREAMED)


@functools.cache
def tar(texts):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as members:
        for number, text in enumerate(texts):
            for ending, content in (("png", RED), ("txt", text.encode())):
                member = tarfile.TarInfo(f"{texts[0]}/{number:03}.{ending}")
                member.size = len(content)
                members.addfile(member, io.BytesIO(content))
    return file.getvalue()


@functools.cache
def parquet(texts):
    rows = pytest.importorskip("pyarrow").table({"image": [RED] * len(texts), "text": [*texts]})
    file = io.BytesIO()
    options = {"row_group_size": 15, "write_page_checksum": True}
    pytest.importorskip("pyarrow.parquet").write_table(rows, file, **options)
    return file.getvalue()


@functools.cache
def saved_set():
    """The files of a set that `datasets` saved."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        rows = {"image": [{"bytes": RED, "path": None}] * len(TEXTS), "text": TEXTS}
        datasets.Dataset.from_dict(rows).save_to_disk(folder)
        return {each.name: each.read_bytes() for each in Path(folder).iterdir()}


ARROW = "data-00000-of-00001.arrow"


def read(format, path):
    """(text, picture) of all records."""
    if format in STREAMED:
        pieces = Chunks(STREAMED[format], path, 2)
        records = [record for i in range(len(pieces)) for record in pieces.open(i)]
    else:
        records = [*open_records(format.removesuffix(" lines"), path)]
    return [(r.messages[-1].parts[0], *(p.read() for p in r.pictures)) for r in records]


# ---- cells


def makes_sense(cell):
    """Only text is encoded; packed files are not read at all; folders hold tars and parquet."""
    text = STREAMED.get(cell.format, cell.format) in CONTENT
    if (cell.damage in ENCODINGS and not text) or (cell.compression and cell.damage != "none"):
        return False
    alone = text or cell.format == "dataset"
    return not (alone and cell.place == "folder") and not (cell.damage == "wrong ending" and alone)


GRID = product(FORMATS, ("", "gz"), (*ENCODINGS, *BYTES, *FILES), ("given", "folder"))
CELLS = [cell for each in GRID if makes_sense(cell := damages.FileCell(*each))]
COVERING = covering(CELLS)


def write(cell, folder):
    """Write the files of a cell. Returns the path to read, and the bytes of the damaged file."""
    format = STREAMED.get(cell.format, cell.format)
    if format in CONTENT:
        name, content = CONTENT[format][0], CONTENT[format][1](TEXTS).encode()
    elif format == "dataset":
        name, content = ARROW, saved_set()[ARROW]
        for other in saved_set().keys() - {name}:
            (folder / other).write_bytes(saved_set()[other])
    else:
        make = tar if format == "webdataset" else parquet
        name, content = ("a.tar" if make is tar else "a.parquet"), make(tuple(TEXTS))
        if cell.place == "folder":
            (folder / name.replace("a", "z", 1)).write_bytes(make(tuple(MORE)))
    (folder / "red.png").write_bytes(RED)
    content = ENCODINGS.get(cell.damage, bytes)(content)
    content = BYTES.get(cell.damage, bytes)(PACKERS[cell.compression](content))
    path = folder / name
    if cell.damage == "wrong ending":
        path = path.with_suffix(".tar" if path.suffix == ".parquet" else ".parquet")

    write_damaged(path, content, cell.damage)
    given = cell.place == "given" and format not in ("folder", "folder lines", "dataset")
    return path if given else folder, content


# ---- what is wanted


NOT_JSON = {("", "not_json"), ("", "encoding")}
#: Problems of formats, where a file is not of its format, and of damages.
SPOILT = {
    "chat": NOT_JSON,
    "llava": NOT_JSON,
    "llava lines": NOT_JSON,
    "coco": NOT_JSON | {("", "not_coco")},
    "folder": {("", "not_csv"), ("caption", "type"), ("path", "type"), ("", "unreadable")},
    "folder lines": NOT_JSON,
    "parquet": {("", "bad_parquet"), ("", "damaged")},
    "dataset": {("", "not_saved"), ("", "truncated")},
    "webdataset": {("", "bad_tar"), ("", "no_text")},
    "wrong ending": {("path", "format")},
    "folder in place": {("", "not_a_file"), ("", "no_parquet"), ("", "no_tar"), ("path", "format")},
    "fifo": {("", "not_a_file"), ("path", "empty"), ("", "bad_tar")},
    "dead link": {("path", "not_found"), ("", "no_metadata"), ("", "no_parquet"), ("", "no_tar"),
                  ("", "not_saved"), ("", "unreadable")},
    "rights": {("", "unreadable"), ("", "not_saved")},
}  # fmt: skip


def parsed(format, content):
    """What a file of text holds, by the standard library; None where it is not of its format."""
    try:
        if format == "folder":
            text = io.StringIO(content.decode("utf-8-sig"), newline="")
            header, *rows = list(csv.reader(text, strict=True)) or [[]]
            assert not rows or header == ["file_name", "text"]
            assert all(row[0] == "red.png" and len(row) == 2 for row in rows)
            return [row[1] for row in rows]
        if format in ("llava", "coco"):
            value = json.loads(content)
            if format == "coco":
                assert value["images"] == captions([])["images"]
                return [note["caption"] for note in value["annotations"]]
            return [row["conversations"][1]["value"] for row in value]
        rows = [json.loads(line) for line in io.BytesIO(content) if line.strip()]
        if format == "folder lines":
            return [row["text"] for row in rows if row["file_name"]]
        if format == "llava lines":
            return [row["conversations"][1]["value"] for row in rows if row["image"]]
        return [row["messages"][1]["content"] for row in rows]
    except (ValueError, LookupError, AssertionError, csv.Error):
        return None


def rows_of(content):
    """The rows of an Arrow stream that is one and no more."""
    arrow = pytest.importorskip("pyarrow")
    try:
        rows = arrow.ipc.open_stream(content).read_all().to_pylist()
    except (arrow.ArrowException, OSError):
        return None
    return [(row["text"], row["image"]["bytes"]) for row in rows]


def wanted(cell, content):
    """(what may be read or None, the problems that may be raised instead); `content` is that of the damaged file."""
    format, damage = STREAMED.get(cell.format, cell.format), cell.damage
    own = [(text, RED) for text in TEXTS]
    problems = SPOILT[format]
    if damage == "wrong ending":
        if cell.place == "folder":  # its name does not say what it is
            return [], set()
        return (None, SPOILT[damage]) if cell.format in STREAMED else (own, set())
    if damage in FILES:
        return None, SPOILT["folder in place" if damage == "folder" else damage]
    if cell.compression:
        return None, problems
    if content == b"" and cell.format in STREAMED:
        return None, {("path", "empty")}
    if format in CONTENT:
        texts = parsed(format, content)
        # the libraries' JSON is of any encoding, and a key with a flipped byte is a misspelt one
        sure = texts is not None and not damage.startswith(("flipped", "utf-16"))
        found = None if texts is None else [(text, RED) for text in texts]
        return found, set() if sure else problems | {"misspelt"}
    if format == "dataset":
        same = len(content) == len(saved_set()[ARROW])
        return rows_of(content) if same else None, problems if damage != "none" else set()
    if format == "webdataset":
        # Python's tarfile ends tars with zeros up to a multiple of 10,240 bytes
        harmless = damage in ("none", "zeros", "cut by a byte", "cut by 8 bytes")
    else:
        harmless = damage == "none"
    return own if harmless or "flipped" in damage else None, set() if harmless else problems


def fault(cell):
    """What is wrong with a cell; None if nothing is."""
    with tempfile.TemporaryDirectory(
        dir="/tmp"
    ) as folder:  # pytest's own are not open to other users
        Path(folder).chmod(0o755)
        path, content = write(cell, Path(folder))
        found, problems = wanted(cell, content)
        if cell.place == "folder" and found is not None:
            found = found + [(text, RED) for text in MORE]
        try:
            with as_user() if cell.damage == "rights" else contextlib.nullcontext():
                got = read(cell.format, path)
        except InvalidSample as error:
            key, code = error.problems[0].key, error.problems[0].code
            assert_problem(error, key, code=code)  # on record
            known = (key, code) in problems or code in problems
            return None if known and folder in str(error) else (cell, error)
        return None if got == found else (cell, f"{len(got)} were read")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cells", ["covering", pytest.param("all", marks=pytest.mark.slow)])
def test_damaged_samples_are_read_as_written_or_are_one_problem(
    format, cells, tmp_path, monkeypatch
):
    if format in ("parquet", "dataset"):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    chosen = [c for c in CELLS if c.format == format and (cells == "all" or c in COVERING)]
    assert [found for cell in chosen if (found := fault(cell))] == []

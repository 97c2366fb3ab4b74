"""Each format gives the documents of the plain text, in parts too; each damage gets one sentence."""

import bz2
import csv
import errno
import gzip
import json
import logging
import lzma
import os
import random
import sys
import tarfile
import tracemalloc

import pytest

from forge_data import InvalidData
from forge_data.chat.messages import find_conversations
from forge_data.prepare import prepare
from forge_data.prepare.read import find_inputs, read_documents
from forge_data.tokens.files import TokenFiles
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

TEXTS = ["one\ntwo", "three é", "  ", "four\r\n five", "🙂" * 50, "last"]
KEPT = [text for text in TEXTS if text.strip()]
RECORDS = "".join(json.dumps({"n": 1, "text": text}) + "\n" for text in TEXTS).encode()


def write_gzip(path, content):
    path.write_bytes(gzip.compress(content[:50]) + gzip.compress(content[50:]) + b"\0" * 512)


def write_zstd(path, content):
    pack = pytest.importorskip("zstandard").ZstdCompressor().compress
    path.write_bytes(pack(content[:50]) + pack(content[50:]))


def write_xz(path, content):
    path.write_bytes(lzma.compress(content[:50]) + lzma.compress(content[50:]) + b"\0" * 8)


def write_bzip2(path, content):
    path.write_bytes(bz2.compress(content[:50]) + bz2.compress(content[50:]))


def write_csv(path, content):
    rows = [json.loads(line) for line in content.splitlines()]
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def write_parquet(path, content, **options):
    arrow = pytest.importorskip("pyarrow")
    rows = [json.loads(line) for line in content.splitlines()]
    table = arrow.Table.from_pylist(rows)
    pytest.importorskip("pyarrow.parquet").write_table(
        table, path, **{"row_group_size": 2, **options}
    )


WRITERS = {
    "a.jsonl": lambda path, content: path.write_bytes(content),
    "a.jsonl.gz": write_gzip,
    "a.jsonl.zst": write_zstd,
    "a.jsonl.xz": write_xz,
    "a.jsonl.bz2": write_bzip2,
    "a.csv": write_csv,
    "a.parquet": write_parquet,
}


def documents(path, document="file", field="text", part=None):
    found, waiting = [], ""
    for text, last in read_documents(path, document, field, lambda done: None, part):
        waiting += text
        if last:
            found.append(waiting)
            waiting = ""
    assert waiting == ""
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_documents(tmp_path, name):
    WRITERS[name](tmp_path / name, RECORDS)
    assert documents(tmp_path / name) == KEPT


@pytest.mark.parametrize("writer", [write_gzip, write_zstd])
@pytest.mark.parametrize("kind", ["file", "line", "blank_line"])
def test_packed_text_is_the_text(tmp_path, writer, kind):
    content = "\n\n".join(TEXTS).encode()
    (tmp_path / "a.txt").write_bytes(content)
    writer(tmp_path / "b.txt.gz" if writer is write_gzip else tmp_path / "b.txt.zst", content)
    plain, packed = find_inputs([tmp_path])
    assert documents(packed, kind) == documents(plain, kind)


@pytest.mark.lane("quick")
def test_large_files_unpack_to_the_same_text(tmp_path):
    lines = [f"{i} {i * i % 977} some words" for i in range(100_000)]
    for writer, name in ((write_gzip, "a.txt.gz"), (write_zstd, "a.txt.zst")):
        writer(tmp_path / name, "\n".join(lines).encode())
        assert documents(tmp_path / name, "line") == lines


def test_chunks_of_text_and_parquet_add_up_to_the_file(tmp_path):
    write_parquet(tmp_path / "a.parquet", RECORDS)
    assert documents(tmp_path / "a.parquet", part=(0, 1)) == KEPT[:2]
    assert documents(tmp_path / "a.parquet", part=(1, 3)) == KEPT[2:]
    (tmp_path / "a.jsonl").write_bytes(RECORDS)
    cut = RECORDS.index(b"\n", 50) + 1
    head = documents(tmp_path / "a.jsonl", part=(0, cut))
    assert head + documents(tmp_path / "a.jsonl", part=(cut, len(RECORDS))) == KEPT
    assert head


def test_a_line_of_a_part_is_counted_from_the_start_of_its_file(tmp_path):
    content = RECORDS + b'{"text": 3}\n'
    (tmp_path / "a.jsonl").write_bytes(content)
    with rejects("text", 3, "type", InvalidData, where="line 7"):
        documents(tmp_path / "a.jsonl", part=(RECORDS.index(b"\n") + 1, len(content)))
    (tmp_path / "b.txt").write_bytes(RECORDS + b"\xff\n")
    with rejects("", ..., "encoding", InvalidData, where=f" {len(RECORDS)} "):
        documents(tmp_path / "b.txt", "line", part=(RECORDS.index(b"\n") + 1, len(RECORDS) + 2))


def test_a_byte_order_mark_is_one_at_the_start_of_a_file_only(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n")
    assert documents(tmp_path / "a.txt", "line") == ["one", "\ufefftwo"]
    assert documents(tmp_path / "a.txt", "line", part=(7, 14)) == ["\ufefftwo"]


def test_folders_are_searched_for_every_format(tmp_path):
    names = ["A.TXT", "B.JSONL.GZ", "a.txt", "b.md.gz", "c.jsonl.zst", "d.parquet", "e.txt.zst"]
    names += ["f.json.gz", "g.csv", "g.ndjson", "h.csv.xz", "i.txt.bz2"]
    for name in [*names, "f.zst", "h.json", "parquet"]:
        (tmp_path / name).write_text("")
    assert [path.name for path in find_inputs([tmp_path])] == names


@pytest.mark.parametrize("name", ["A.JSONL", "a.ndjson", "a.json", "a.Json.GZ"])
def test_names_of_json_lines_are_read_as_records(tmp_path, name):
    """As text, their braces would be learnt."""
    write = gzip.compress if name.endswith("GZ") else bytes
    (tmp_path / name).write_bytes(write(b'{"text": "words"}\n'))
    assert documents(tmp_path / name) == ["words"]


def test_links_are_followed_and_what_two_lead_to_is_read_once(tmp_path):
    for folder in ("in/b", "in/c", "elsewhere/deep"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("in/b/b.txt", "in/c/c.txt", "elsewhere/deep/e.txt", "elsewhere/.h.txt"):
        (tmp_path / file).write_text(file)
    (tmp_path / "in/a").symlink_to("b")  # a second name of what is there
    (tmp_path / "in/c/up").symlink_to("../..")  # a circle
    (tmp_path / "in/z").symlink_to("../elsewhere")
    found = [str(path.relative_to(tmp_path)) for path in find_inputs([tmp_path / "in"])]
    assert found == ["in/b/b.txt", "in/c/c.txt", "in/z/deep/e.txt"]


def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError, match=r"\[Errno 13\].*closed"):
        find_inputs([tmp_path])


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_every_type_of_strings_in_parquet_is_text(tmp_path, kind):
    arrow = pytest.importorskip("pyarrow")
    type_ = (
        arrow.dictionary(arrow.int32(), arrow.string())
        if kind == "dictionary"
        else getattr(arrow, kind)()
    )
    table = arrow.table({"text": arrow.array(KEPT).cast(type_)})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet") == KEPT


def table(**columns):
    def write(path):
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), path)

    return write


def twice(path):
    arrow = pytest.importorskip("pyarrow")
    columns = arrow.table([["x"], ["y"], [1]], names=["text", "text", "n"])
    pytest.importorskip("pyarrow.parquet").write_table(columns, path)


def not_utf8(path):
    arrow = pytest.importorskip("pyarrow")
    strings = arrow.array([b"fine", b"caf\xe9"]).view(arrow.string())
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"text": strings}), path)


def write_tar(path, mode):
    content = path.with_name("content.md")
    content.write_text("words")
    with tarfile.open(path, mode) as tar:
        tar.add(content, "a.txt")
    content.unlink()


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("xz", lzma.compress)])
@pytest.mark.parametrize("zeros", [8, 8192, 20_000])
def test_F173_zeros_after_a_member_are_padding(tmp_path, ending, pack, zeros):
    """Of any number, at the end and before another member; zeros inside of a member are its own."""
    path = tmp_path / f"a.txt.{ending}"
    padding = b"\0" * zeros
    text = b"\0 in the text of a member\n"
    path.write_bytes(pack(text) + padding + pack(text) + padding)
    assert documents(path) == [2 * text.decode()]
    path.write_bytes(pack(b"one") + padding + b"not packed at all")
    with rejects("", ..., "damaged", InvalidData, where=path):
        documents(path)


DAMAGED = {
    "surrogate.jsonl": (
        lambda p: p.write_text('{"text": "\\ud83d\\ude42"}\n{"text": "a\\ud800b"}\n'),
        ("text", ..., "surrogate"),
    ),
    "text.jsonl.zst": (lambda p: p.write_text("{}" * 9), ("", ..., "damaged")),
    "text.parquet": (lambda p: p.write_text("{}" * 9), ("", ..., "damaged")),
    "no column.parquet": (table(body=["x"], n=[1]), ("text_field", "text", "missing")),
    "F172 twice.parquet": (twice, ("text_field", "text", "duplicate")),
    "numbers.parquet": (table(text=[1, 2]), ("text_field", "text", "type")),
    "lists.parquet": (table(text=[["a"]]), ("text_field", "text", "type")),
    "null.parquet": (table(text=["a", None]), ("text", None, "null")),
    "latin1.parquet": (not_utf8, ("text", ..., "encoding")),
    "no column.csv": (lambda p: p.write_text("body,n\nx,1\n"), ("text_field", "text", "missing")),
    "twice.csv": (lambda p: p.write_text("text,text\nx,1\n"), ("text_field", "text", "duplicate")),
    "short.csv": (lambda p: p.write_text("n,text\n1,x\n2\n"), ("", 1, "columns")),
    "long.csv": (lambda p: p.write_text("n,text\n1,a, b\n"), ("", 3, "columns")),
    "quote.csv": (lambda p: p.write_text('text\n"a"b\n'), ("", ..., "not_csv")),
    "open.csv": (lambda p: p.write_text('text\n"a\n'), ("", ..., "not_csv")),
    "utf32.txt.gz": (lambda p: write_gzip(p, "plain".encode("utf-32-le")), ("", ..., "utf16")),
    "cyrillic.txt": (
        lambda p: p.write_bytes(("слова и слова. " * 9).encode("utf-16-le")),
        ("", ..., "utf16"),
    ),
    "books.tar": (lambda p: write_tar(p, "w"), ("", ..., "unsupported")),
    "books.txt": (lambda p: write_tar(p, "w"), ("", ..., "unsupported")),
    "books.tar.gz": (lambda p: write_tar(p, "w:gz"), ("", ..., "unsupported")),
    "books.txt.xz": (lambda p: write_tar(p, "w:xz"), ("", ..., "unsupported")),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_F150_what_is_wrong_with_a_file_is_one_line(tmp_path, name):
    write, problem = DAMAGED[name]
    if name.endswith(".zst"):
        pytest.importorskip("zstandard")
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    write(tmp_path / name)
    with rejects(*problem, InvalidData, where=name) as error:
        documents(tmp_path / name)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500 + len(str(tmp_path))


def test_a_damaged_data_page_of_parquet_is_found(tmp_path):
    write_parquet(tmp_path / "a.parquet", RECORDS, write_page_checksum=True, compression="none")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"four", b"foul", 1))
    with rejects("", ..., "damaged", InvalidData, where="a.parquet"):
        documents(tmp_path / "a.parquet")


@pytest.mark.parametrize("module", ["pyarrow", "zstandard"])
def test_a_missing_extra_is_one_line(tmp_path, monkeypatch, module):
    name = {"pyarrow": "a.parquet", "zstandard": "a.txt.zst"}[module]
    (tmp_path / name).write_text("")
    monkeypatch.setitem(sys.modules, module, None)
    with rejects("", ..., "requires", where=name) as error:
        documents(tmp_path / name)
    assert not isinstance(error.value, InvalidData)


@pytest.mark.lane("quick")
@pytest.mark.parametrize("writer", [write_gzip, write_zstd])
def test_memory_does_not_grow_with_what_a_file_unpacks_to(tmp_path, writer):
    path = tmp_path / ("a.txt.gz" if writer is write_gzip else "a.txt.zst")
    writer(path, random.Random(0).randbytes(8_000_000).hex().encode())
    tracemalloc.start()
    count = sum(len(text) for text, _ in read_documents(path, "file", "text", lambda done: None))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 16_000_000
    assert peak < 12_000_000  # a few pieces of a MB


def test_reports_end_at_the_size_of_the_file(tmp_path):
    for name, writer in WRITERS.items():
        writer(tmp_path / name, RECORDS * 20)
        done = [0]
        for _ in read_documents(tmp_path / name, "file", "text", done.append):
            pass
        assert done == sorted(done)
        size = (tmp_path / name).stat().st_size
        assert abs(done[-1] - size) <= 1, name


def test_F150_files_of_a_folder_that_are_not_read_are_reported(tmp_path, caplog):
    for name in ("a.jsonl", "b.json", "c.png", "d.PNG", "e/.hidden.png", "plain"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text('{"text": "x"}')
    with caplog.at_level(logging.WARNING, "forge_data"):
        prepare(tmp_path / "in", tmp_path / "out")
    (line,) = caplog.messages
    assert "4" in line
    assert all(word in line for word in (str(tmp_path / "in"), "1 .json", "2 .png", "1 without"))
    caplog.clear()
    prepare(tmp_path / "in/a.jsonl", tmp_path / "given")
    assert not caplog.messages


def dead(folder):
    (folder / "gone").symlink_to("nowhere")


def circle(folder):
    (folder / "gone.txt").symlink_to("gone.txt")


def tar(folder):
    write_tar(folder / "gone.tar.zst", "w")


@pytest.mark.parametrize(
    ("make", "code"),
    [(dead, "not_found"), (circle, "not_found"), (tar, "unsupported")],
)
def test_F150_what_cannot_be_read_of_a_folder_is_an_error(tmp_path, make, code):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.jsonl").write_text("{}")
    make(tmp_path)
    with rejects("", ..., code, InvalidData, where=tmp_path / "gone"):
        find_inputs([tmp_path])
    if make is not tar:  # of conversations, too
        (tmp_path / "gone.jsonl").symlink_to(next(tmp_path.glob("gone*")))
        with rejects("", ..., code, InvalidData, where=tmp_path / "gone"):
            find_conversations(tmp_path, "train")


def test_F150_fields_of_csv_are_of_any_length_and_hold_line_ends(tmp_path):
    texts = ["a" * 300_000, 'two\r\nlines, "quoted"', "\ufeffend"]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["text"], *[[text] for text in texts]])
    assert documents(tmp_path / "a.csv") == texts


def test_text_may_hold_a_few_nulls(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"nul \0 in a long enough line of text")
    assert documents(tmp_path / "a.txt") == ["nul \0 in a long enough line of text"]


@pytest.mark.parametrize("name", WRITERS)
def test_F134_content_next_to_the_text_is_named_and_other_keys_are_counted(tmp_path, name):
    """Of lines and of row groups, in parts too; a table gives all rows the keys of all."""
    rows = [{"text": f"t{i}", "id": i, "images": None, "meta": {"a": 1} if i % 2 else None} for i in range(6)]  # fmt: skip
    WRITERS[name](tmp_path / name, "".join(json.dumps(r) + "\n" for r in rows).encode())
    prepared = prepare(tmp_path / name, tmp_path / "out")
    assert prepared.statistics["not_read"] == {"id": 6, "meta": 3}
    line = "6 documents, 18 tokens; keys not read: id (6), meta (3)"
    assert TokenFiles(tmp_path / "out").summary() == line
    with rejects("id", code="strict", kind=InvalidData, where=name):
        prepare(tmp_path / name, tmp_path / "strict", strict=True)

    for key, code in {"images": "not_read", "messages": "not_read", "texts": "misspelt"}.items():
        path = tmp_path / f"{key}-{name}"
        lines = [{**row, key: None} for row in rows[:4]] + [{**rows[4], key: ["a.png"]}]
        WRITERS[name](path, "".join(json.dumps(r) + "\n" for r in lines).encode())
        where = path if "parquet" in name else f"{path} line {6 if 'csv' in name else 5}"
        with rejects(key, code=code, kind=InvalidData, where=where):
            prepare(path, tmp_path / "bad")
        found = prepare(path, tmp_path / f"{key}-out", ignore_keys=[key], strict=False)
        assert found.statistics["not_read"] == {"id": 5, "meta": 2, key: 1}
    with rejects("ignore_keys", "id", "type"):
        prepare(tmp_path / name, tmp_path / "no", ignore_keys="id")

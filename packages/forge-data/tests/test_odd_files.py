"""F107, F111: files and paths that are something else get one sentence, in bounded memory and time."""

import gzip
import json
import os

import pytest

from forge_data import InvalidData, JsonTokenizer, SourceConfig, TokenFiles, load_tokenizer
from forge_data.prepare import prepare

pytestmark = pytest.mark.lane("test")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("some words\n" * 20)
    return tmp_path / "a.txt"


@pytest.fixture
def folder(text, tmp_path):
    prepare(text, tmp_path / "tokens", document="line")
    return tmp_path / "tokens"


def write(content):
    return lambda path: path.write_bytes(content)


def replace(maker):
    """A maker that first takes the file away."""

    def make(path):
        path.unlink()
        maker(path)

    return make


def sparse(path):
    os.truncate(path, 1 << 40)


def change(**values):
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


SIDECARS = {
    "deep": (write(b"[" * 200_000), "must be JSON of a few levels, not nested deep"),
    "deep table": (write(b'{"a":' * 200_000), "must be JSON of a few levels, not nested deep"),
    "integer of 5000 digits": (write(b'{"version": ' + b"9" * 5000 + b"}"), "must be JSON"),
    "not UTF-8": (write(b"\xff\xfe{}"), "must be JSON"),
    "a terabyte": (sparse, "has 1099511627776 bytes, and such a file has at most 1048576"),
    "fifo": (replace(os.mkfifo), "must be a regular file, not a folder, FIFO or device"),
    "/dev/zero": (replace(lambda p: p.symlink_to("/dev/zero")), "must be a regular file"),
    "folder": (replace(lambda p: p.mkdir()), "must be a regular file"),
    "tokenizer {}": (change(tokenizer={}), r"has tokenizer {}, which must be null or have a"),
    "tokenizer eos a list": (change(tokenizer={"name": "json", "eos": [1]}), "has tokenizer {"),
    "counts true": (change(num_tokens=True), "must have a valid num_tokens"),
    "max_token_id negative": (change(max_token_id=-1), r"-1, which must be within 0..vocab_size-1"),
    "vocab_size too small": (change(vocab_size=5), r"within 0..vocab_size-1 \(vocab_size 5\)"),
    "block_bytes 0": (change(block_bytes=0), "has block_bytes 0, which must be within 1 KiB"),
    "block_bytes text": (change(block_bytes="x" * 999), "has block_bytes 'xxx"),
    "version absurd": (change(version="9" * 999), "has version 9999"),
}


@pytest.mark.parametrize("name", SIDECARS)
def test_F107_a_sidecar_that_is_something_else(folder, name):
    make, message = SIDECARS[name]
    make(folder / "tokens.json")
    with pytest.raises(InvalidData, match=message) as error:
        TokenFiles(folder)
    assert "tokens.json" in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("make", [os.mkfifo, lambda p: p.symlink_to("/dev/zero")])
def test_F107_a_path_that_is_no_file(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(InvalidData, match="must be a folder of token files or a regular file"):
        TokenFiles(tmp_path / "x", dtype="uint8")
    with pytest.raises(InvalidData, match="must be a file or a folder"):
        prepare(tmp_path / "x", tmp_path / "out")
    with pytest.raises(InvalidData, match="must be a JSON file"):
        JsonTokenizer(tmp_path / "x")


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b"])
def test_F107_a_path_that_no_file_can_have(text, tmp_path, path):
    message = "must be a file name, without NUL or lone surrogates; correct it"
    with pytest.raises(ValueError, match=message):
        SourceConfig(name="tokens", path=path)
    with pytest.raises(ValueError, match=message):
        prepare(path, tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        prepare(text, tmp_path / path)


@pytest.mark.parametrize("content", [b"{}", b"[]", b"[" * 100_000, b"null", b"\xff"])
def test_F107_json_that_is_no_tokenizer(tmp_path, content):
    pytest.importorskip("tokenizers")
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(InvalidData, match=r"t.json must be a JSON file of the tokenizers library"):
        load_tokenizer(str(tmp_path / "t.json"))
    sparse(tmp_path / "t.json")
    with pytest.raises(InvalidData, match="such a file has at most 268435456"):
        load_tokenizer(str(tmp_path / "t.json"))


FORMATS = {
    "p.jsonl": (gzip.compress(b'{"text": "x"}'), "gzip file by its first bytes.*to end in .gz"),
    "p.txt": (b"\x28\xb5\x2f\xfd\x00", "zstd file by its first bytes.*to end in .zst"),
    "p.bin": (b"PAR1\x15\x04", "parquet file by its first bytes.*to end in .parquet"),
    "p.parquet.gz": (b"\x1f\x8b", "packed parquet file.*unpack it first"),
    "p.bz2": (b"BZh9", "bzip2 file, which .*; unpack it with bunzip2"),
    "p.pdf": (b"%PDF-1.7", "PDF file, which .*; extract its text"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_F111_formats_that_are_not_read_are_named(tmp_path, name):
    content, message = FORMATS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidData, match=message) as error:
        prepare([tmp_path / name], tmp_path / "out")
    assert "UTF-8" not in str(error.value)


def test_F111_one_path_is_one_input(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i, given in enumerate(("a.txt", text)):
        assert prepare(given, f"out{i}", document="line").num_documents == {"train": 20}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"text": null}',
            "line 1 has null as 'text', which must be a string; give it text or leave",
        ),
        ('{"text": [1, 2]}', r"line 1 has \[1, 2\] as 'text'"),
        ('{"body": "x"}', r"\(it has: body\); name its field with text_field \(--text_field\)"),
        ("[" * 100_000, "line 1 must be JSON of a few levels"),
        ("9" * 5000, "line 1 must be JSON"),
    ],
)
def test_F111_what_stands_in_a_line_is_said(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(InvalidData, match=message) as error:
        prepare(tmp_path / "a.jsonl", tmp_path / "out")
    assert len(str(error.value)) < 400


def test_F111_a_python_caller_is_told_a_python_argument(text, folder):
    with pytest.raises(ValueError, match=r"replace it with overwrite=True \(--overwrite\)"):
        prepare(text, folder)

"""F107, F111: files and paths that are something else get one sentence, in bounded memory and time."""

import json
import os

import pytest

from forge_data import InvalidData, JsonTokenizer, SourceConfig, TokenFiles, load_tokenizer
from forge_data.prepare import prepare
from forge_data.tokens.format import read_statistics
from forge_testing.problems import rejects

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
    "deep": (write(b"[" * 200_000), ("", ..., "depth")),
    "deep table": (write(b'{"a":' * 200_000), ("", ..., "depth")),
    "integer of 5000 digits": (write(b'{"version": ' + b"9" * 5000 + b"}"), ("", ..., "not_json")),
    "not UTF-8": (write(b"\xff\xfe{}"), ("", ..., "encoding")),
    "a terabyte": (sparse, ("", 1099511627776, "length")),
    "/dev/zero": (replace(lambda p: p.symlink_to("/dev/zero")), ("", ..., "not_a_file")),
    "folder": (replace(lambda p: p.mkdir()), ("", ..., "not_a_file")),
    "tokenizer {}": (change(tokenizer={}), ("tokenizer", {}, "spec")),
    "tokenizer eos a list": (
        change(tokenizer={"name": "json", "eos": [1]}),
        ("tokenizer", {"name": "json", "eos": [1]}, "spec"),
    ),
    "counts true": (change(num_tokens=True), ("num_tokens", True, "type")),
    "max_token_id negative": (change(max_token_id=-1), ("max_token_id", -1, "range")),
    "vocab_size too small": (change(vocab_size=5), ("max_token_id", 256, "range")),
    "block_bytes 0": (change(block_bytes=0), ("block_bytes", 0, "range")),
    "block_bytes text": (change(block_bytes="x" * 999), ("block_bytes", "x" * 999, "range")),
    "version absurd": (change(version="9" * 999), ("version", "9" * 999, "version")),
}


@pytest.mark.parametrize("name", SIDECARS)
def test_F107_a_sidecar_of_another_kind(folder, name):
    make, problem = SIDECARS[name]
    make(folder / "tokens.json")
    with rejects(*problem, InvalidData, where="tokens.json") as error:
        TokenFiles(folder)
    assert len(str(error.value)) < 500


def test_statistics_of_another_kind(folder):
    (folder / "statistics.json").write_text("?")
    with rejects("", ..., "not_json", InvalidData, where="statistics.json"):
        read_statistics(folder)


@pytest.mark.parametrize("make", [os.mkfifo, lambda p: p.symlink_to("/dev/zero")])
def test_F107_a_path_that_is_no_file(tmp_path, make):
    make(tmp_path / "x")
    with rejects("path", str(tmp_path / "x"), "not_a_file", InvalidData):
        TokenFiles(tmp_path / "x", dtype="uint8")
    with rejects("inputs", str(tmp_path / "x"), "not_found", InvalidData):
        prepare(tmp_path / "x", tmp_path / "out")
    with rejects("tokenizer", str(tmp_path / "x"), "not_found", InvalidData):
        JsonTokenizer(tmp_path / "x")


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b"])
def test_F107_a_path_that_no_file_can_have(text, tmp_path, path):
    with rejects("path", path, "file_name"):
        SourceConfig(name="tokens", path=path)
    with rejects("inputs", path, "file_name"):
        prepare(path, tmp_path / "out")
    with rejects("output", str(tmp_path / path), "file_name"):
        prepare(text, tmp_path / path)


@pytest.mark.parametrize("content", [b"{}", b"[]", b"[" * 100_000, b"null", b"\xff"])
def test_F107_json_that_is_no_tokenizer(tmp_path, content):
    pytest.importorskip("tokenizers")
    (tmp_path / "t.json").write_bytes(content)
    with rejects("tokenizer", str(tmp_path / "t.json"), "damaged", InvalidData):
        load_tokenizer(str(tmp_path / "t.json"))
    sparse(tmp_path / "t.json")
    with rejects("", 1099511627776, "length", InvalidData, where="t.json"):
        load_tokenizer(str(tmp_path / "t.json"))


FORMATS = {
    "p.bin": (b"PAR1\x15\x04", ("", ..., "ending")),
    "p.parquet.gz": (b"\x1f\x8b", ("", ..., "packed")),
    "p.zip": (b"PK\x03\x04", ("", ..., "unsupported")),
    "p.pdf": (b"%PDF-1.7", ("", ..., "unsupported")),
}


@pytest.mark.parametrize("name", FORMATS)
def test_F111_formats_that_are_not_read_are_named(tmp_path, name):
    content, problem = FORMATS[name]
    (tmp_path / name).write_bytes(content)
    with rejects(*problem, InvalidData, where=name) as error:
        prepare([tmp_path / name], tmp_path / "out")
    assert "UTF-8" not in str(error.value)


def test_F111_one_path_is_one_input(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i, given in enumerate(("a.txt", text)):
        assert prepare(given, f"out{i}", document="line").num_documents == {"train": 20}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            '{"text": null}',
            ("text", None, "type"),
        ),
        ('{"text": [1, 2]}', ("text", [1, 2], "type")),
        ('{"body": "x"}', ("text", ..., "missing")),
        ("[" * 100_000, ("", ..., "depth")),
        ("9" * 5000, ("", ..., "not_json")),
    ],
)
def test_F111_errors_quote_the_content_of_a_line(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with rejects(*problem, InvalidData, where="a.jsonl line 1") as error:
        prepare(tmp_path / "a.jsonl", tmp_path / "out")
    assert len(str(error.value)) < 400


def test_F111_errors_name_the_python_argument_for_a_python_caller(text, folder):
    with rejects("output", str(folder), "exists"):
        prepare(text, folder)

"""Built-in text and token files; what is wrong on disk is said in one sentence."""

import ast
import importlib.util
import json
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from forge_data import (
    BuiltinCorpus,
    InvalidData,
    PackedStream,
    SourceConfig,
    TokenFiles,
    load_tokenizer,
    open_source,
    verify,
)
from forge_data.kinds import CACHED, is_streamed
from forge_data.prepare import prepare
from forge_data.sources.open import _MODULES
from forge_data.tokens import raw as raw_files
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


@pytest.fixture
def folder(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line number {i}\n" for i in range(60)))
    prepare([text], tmp_path / "tokens", document="line")
    return tmp_path / "tokens"


def edit(folder, **changes):
    path = folder / "tokens.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "drop"}))


def test_a_python_without_its_manual(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with rejects("pydoc_data.topics", ..., "missing", InvalidData):
        BuiltinCorpus()


def test_builtin_is_the_manual_of_python():
    from pydoc_data.topics import topics

    train, validation = BuiltinCorpus("train"), BuiltinCorpus("validation")
    texts = set()
    for source in (train, validation):
        ends = [*source.documents[1:].tolist(), source.num_tokens]
        tokenizer = load_tokenizer(source.tokenizer)
        for start, stop in zip(source.documents.tolist(), ends, strict=True):
            ids = source.read(start, stop).tolist()
            assert ids[-1] == tokenizer.eos_id
            texts.add(tokenizer.decode(ids))
    assert texts == set(topics.values())
    assert train.num_documents + validation.num_documents == len(topics)
    share = validation.num_tokens / (validation.num_tokens + train.num_tokens)
    assert 0.05 < share < 0.08
    assert train.fingerprint() != validation.fingerprint()


def test_token_files_hold_what_was_prepared(folder):
    source = TokenFiles(folder)
    assert source.read(0, 15).tolist() == [*b"line number 0", 256, ord("l")]
    assert source.num_documents == 60
    assert (source.vocab_size, source.max_token_id) == (257, 256)
    assert source.documents[:2].tolist() == [0, 14]
    assert isinstance(source.documents.base, np.memmap)
    assert not source.read(0, 3).flags.writeable
    assert verify(folder) == source.num_tokens


def test_a_fingerprint_is_of_the_tokens_and_not_of_the_path(folder, tmp_path):
    before = TokenFiles(folder).fingerprint()
    moved = folder.rename(tmp_path / "elsewhere")
    assert TokenFiles(moved).fingerprint() == before


def test_a_worker_is_sent_the_path_and_not_the_tokens(folder):
    sent = pickle.dumps(PackedStream(TokenFiles(folder), 8))
    assert len(sent) < 1000
    assert pickle.loads(sent).instance(2)["tokens"].tolist() == (
        PackedStream(TokenFiles(folder), 8).instance(2)["tokens"].tolist()
    )


def test_F41_a_raw_file_needs_its_dtype_however_its_size_divides(tmp_path):
    raw = tmp_path / "x.bin"
    ids = np.arange(300, dtype="<u2")  # an even count: the bytes fit uint32 too
    raw.write_bytes(ids.tobytes())
    with rejects("dtype", None, "missing", where="x.bin"):
        TokenFiles(raw)
    source = TokenFiles(raw, dtype="uint16")
    assert source.read(0, 300).tolist() == list(range(300))
    assert (source.num_tokens, source.max_token_id, source.num_documents) == (300, 299, 1)
    assert source.vocab_size is None
    assert source.tokenizer is None


def test_raw_files_of_every_dtype(tmp_path):
    for dtype in ("uint8", "uint16", "uint32", "int32", "int64"):
        raw = tmp_path / f"{dtype}.bin"
        raw.write_bytes(np.arange(100).astype(np.dtype(dtype).newbyteorder("<")).tobytes())
        source = TokenFiles(raw, dtype=dtype)
        assert source.read(3, 6).tolist() == [3, 4, 5]
        assert source.max_token_id == 99
        assert len(str(source.fingerprint()["tokens"])) == 64


def test_F197_the_largest_id_of_a_raw_file_is_that_of_all_its_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_files, "_BLOCK", 2)
    for ids in ([9, 1, 2, 3, 4], [1, 2, 9, 3, 4], [1, 2, 3, 4, 9]):
        raw = tmp_path / f"{ids.index(9)}.bin"
        raw.write_bytes(np.array(ids, "<u2").tobytes())
        assert TokenFiles(raw, dtype="uint16").max_token_id == 9


def test_raw_file_problems(tmp_path):
    raw = tmp_path / "x.bin"
    raw.write_bytes(b"abc")
    with rejects("", 3, "length", InvalidData):
        TokenFiles(raw, dtype="uint16")
    raw.write_bytes(np.array([1, -5], "<i4").tobytes())
    with rejects("id", -5, "negative", InvalidData):
        _ = TokenFiles(raw, dtype="int32").max_token_id
    with rejects("dtype", "float32", "unknown"):
        TokenFiles(raw, dtype="float32")


def test_the_file_inside_a_prepared_folder_has_its_sidecar(folder):
    assert TokenFiles(folder / "tokens.bin").num_documents == 60


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
@pytest.mark.parametrize("change", [-7, 8])
def test_truncated_and_grown_files_are_rejected_at_once(folder, name, change):
    path = folder / name
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + bytes(change))
    size = len(content) + change
    with rejects("", size, "length", InvalidData, where=name):
        TokenFiles(folder)


@pytest.mark.parametrize(
    "key",
    ["dtype", "vocab_size", "tokenizer", "num_tokens", "num_documents", "max_token_id", "sha256"],
)
def test_a_sidecar_without_a_key_is_rejected_by_its_name(folder, key):
    edit(folder, **{key: "drop"})
    with rejects(key, ..., "type", InvalidData, where="tokens.json"):
        TokenFiles(folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": "other"}, ("format", ..., "unknown")),
        ({"version": 2}, ("version", 2, "version")),
        ({"dtype": "float32"}, ("dtype", "float32", "unknown")),
        ({"dtype": "uint32"}, ("", 1780, "length")),
        ({"num_tokens": 0}, ("num_tokens", 0, "range")),
        ({"sha256": {}}, ("sha256.tokens.bin", ..., "missing")),
    ],
)
def test_a_wrong_sidecar_is_rejected(folder, changes, problem):
    edit(folder, **changes)
    with rejects(*problem, InvalidData):
        TokenFiles(folder)


def test_missing_things_are_named(folder, tmp_path):
    with rejects("path", str(tmp_path / "nowhere"), "not_found", InvalidData):
        TokenFiles(tmp_path / "nowhere")
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "tokens.bin").touch()
    with rejects("", ..., "lost", InvalidData, where="tokens.json"):
        TokenFiles(tmp_path / "lost")
    with rejects("dtype", "int64", "mismatch"):
        TokenFiles(folder, dtype="int64")
    (folder / "tokens.json").write_text("{")
    with rejects("", ..., "not_json", InvalidData, where="tokens.json"):
        TokenFiles(folder)
    (folder / "documents.bin").unlink()


def test_splits(tmp_path, folder):
    with rejects("path", str(folder), "no_splits", InvalidData):
        TokenFiles(folder, split="validation")
    prepare([tmp_path / "text.txt"], tmp_path / "two", document="line", validation_every=4)
    train, held_out = (TokenFiles(tmp_path / "two", split=s) for s in ("train", "validation"))
    assert (train.num_documents, held_out.num_documents) == (45, 15)
    assert bytes(held_out.read(0, 13).tolist()) == b"line number 3"
    assert verify(tmp_path / "two") == train.num_tokens + held_out.num_tokens
    with rejects("split", "test", "unknown"):
        TokenFiles(folder, split="test")
    shutil.rmtree(tmp_path / "two" / "validation")
    with rejects("path", str(tmp_path / "two"), "no_split", InvalidData):
        TokenFiles(tmp_path / "two", split="validation")


def test_a_changed_byte_is_found_by_verify(folder):
    path = folder / "tokens.bin"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    TokenFiles(folder)  # no token was read yet
    with rejects("block", 0, "damaged", InvalidData, where="tokens.bin"):
        verify(folder)


def test_verify_compares_the_names_and_the_largest_id_of_the_sidecar(folder):
    recorded = json.loads((folder / "tokens.json").read_text())
    edit(folder, sha256={**recorded["sha256"], "../x": "0"})
    with rejects("sha256", "../x", "outside", InvalidData, where="tokens.json"):
        verify(folder)
    edit(folder, sha256={**recorded["sha256"], "x.bin": "0"})
    with rejects("", ..., "missing", InvalidData, where="x.bin"):
        verify(folder)
    edit(folder, sha256=recorded["sha256"], vocab_size=300, max_token_id=299)
    with rejects("max_token_id", 299, "mismatch", InvalidData, where=" 256;"):
        verify(folder)


def test_F49_an_id_over_the_recorded_largest_is_named_when_read(folder):
    path = folder / "tokens.bin"
    content = bytearray(path.read_bytes())
    content[41] = 0xFF
    path.write_bytes(content)
    with rejects("id", 65397, "range", InvalidData):
        PackedStream(TokenFiles(folder, verify="off"), 64, shuffle=False).instance(0)


@pytest.mark.parametrize("span", [(-1, 2), (5, 3), (0, 10**9)])
def test_a_range_outside_is_rejected(folder, span):
    for source in (TokenFiles(folder), BuiltinCorpus()):
        with rejects("range", span, "range"):
            source.read(*span)


def test_open_source_by_name(folder):
    assert open_source(SourceConfig()).num_documents > 10
    assert open_source(SourceConfig(name="tokens", path=str(folder))).num_documents == 60


def test_open_source_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_source.py").write_text(
        "from forge_data import BuiltinCorpus\n"
        "def build(config):\n    return BuiltinCorpus(config.split)\n"
        "def half(config):\n    return object()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = open_source(SourceConfig(name="my_source:build", split="validation"))
    assert source.split == "validation"
    with rejects("name", "my_source:missing", "not_importable"):
        open_source(SourceConfig(name="my_source:missing"))
    with rejects("name", "no_such_module:x", "not_importable"):
        open_source(SourceConfig(name="no_such_module:x"))
    with rejects("options", {"size": 1}, "signature"):
        open_source(SourceConfig(name="my_source:build", options={"size": 1}))
    with rejects("name", "my_source:half", "incomplete"):
        open_source(SourceConfig(name="my_source:half"))
    sys.modules.pop("my_source")


def write_source(folder, name, module):
    """A distribution with the entry point `corpora` of forge.sources."""
    (folder / f"{module}.py").write_text(
        "from forge_data import BuiltinCorpus\n"
        "class Corpus(BuiltinCorpus):\n"
        "    @property\n    def max_token_id(self):\n        raise AssertionError('reads all files')\n"
        "def build(config, streaming=False):\n    return Corpus(config.split)\n"
    )
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[forge.sources]\ncorpora = {module}:build\n")


def test_open_source_by_entry_point(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    with rejects("name", "corpora", "unknown"):
        SourceConfig(name="corpora")
    write_source(tmp_path, "first", "first_source")
    config = SourceConfig(name="corpora", split="validation")
    assert open_source(config).split == "validation"  # without a look at all ids
    assert is_streamed(SourceConfig(name="corpora", options={"streaming": True}))

    write_source(tmp_path, "second", "second_source")
    with rejects("name", "corpora", "duplicate"):
        open_source(config)
    (tmp_path / "second-1.dist-info" / "entry_points.txt").write_text("")
    (tmp_path / "first_source.py").write_text("import no_such_module\n")
    sys.modules.pop("first_source")
    with rejects("name", "corpora", "not_importable"):
        open_source(config)


def test_kinds_with_a_cache_have_a_module_of_their_own():
    assert {*_MODULES} == {*CACHED}
    for name in _MODULES.values():
        tree = ast.parse(Path(importlib.util.find_spec(name).origin).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {"open_source", "open_header"} <= functions


def test_errors_of_a_parent_folder_name_the_token_folders(folder, tmp_path):
    with rejects("", ..., "no_tokens", InvalidData, where=f" {folder}"):
        TokenFiles(tmp_path)
    prepare([tmp_path / "text.txt"], tmp_path / "x" / "y", document="line", validation_every=9)
    with rejects("", ..., "no_tokens", InvalidData, where=f" {tmp_path / 'x' / 'y'}"):
        verify(tmp_path / "x")
    (tmp_path / "none").mkdir()
    with rejects("", ..., "no_tokens", InvalidData, where="none"):
        verify(tmp_path / "none")
    (tmp_path / "books.parts").mkdir()
    books = str(tmp_path / "books")
    with rejects("path", books, "not_found", InvalidData, where=f"{books}.parts"):
        TokenFiles(books)

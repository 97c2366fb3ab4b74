"""The token cache: one writer, nobody misled by what a killed one left, and sentences for disks."""

import errno
import json
import multiprocessing
import os
import pickle
import signal
from pathlib import Path

import pytest

from forge_data import InvalidData, TokenFiles, open_source
from forge_data.config import SourceConfig
from forge_data.kinds import TextConfig
from forge_data.prepare import prepare
from forge_data.tokens.cache import Entry, file_states, open_cached
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

FORK = multiprocessing.get_context("fork")
WORDS = "so many words to read\n" * 50


def entry_in(folder):
    return Entry.of(str(folder / "cache"), "words", {"key": 1})


def write_words(folder, progress=None):
    """What a kind of source writes: token files, complete or not at all."""
    text = folder.parent / "words.txt"
    text.write_text(WORDS)
    prepare([text], folder, document="line")


def open_words(folder, write=write_words):
    return open_cached(entry_in(folder), "train", "touch", write)


def test_tokens_are_written_once(tmp_path):
    first = open_words(tmp_path)
    again = open_words(tmp_path, write=None)  # nothing calls it
    prepare([tmp_path / "cache/words.txt"], tmp_path / "prepared", document="line")
    assert (
        again.fingerprint()
        == first.fingerprint()
        == TokenFiles(tmp_path / "prepared").fingerprint()
    )
    copy = pickle.loads(pickle.dumps(again))
    assert (copy.read(0, 9) == first.read(0, 9)).all()


@pytest.mark.parametrize("file", ["tokens.bin", "documents.bin", "blocks.bin", "tokens.json"])
def test_a_damaged_entry_is_written_again(tmp_path, file, capsys):
    whole = open_words(tmp_path).fingerprint()
    path = entry_in(tmp_path).folder / file
    path.write_bytes(path.read_bytes()[:-5])
    assert open_words(tmp_path).fingerprint() == whole
    assert str(path) in capsys.readouterr().err


def test_a_damaged_block_ends_the_run_once(tmp_path):
    whole = open_words(tmp_path).fingerprint()
    path = entry_in(tmp_path).folder / "tokens.bin"
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    with rejects("block", 0, "damaged", InvalidData):
        open_words(tmp_path).read(0, 100)
    assert open_words(tmp_path).read(0, 100).size == 100
    assert open_words(tmp_path).fingerprint() == whole


def test_a_full_disk_and_a_folder_that_cannot_be_written_are_one_line(tmp_path):
    def full(folder, progress):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "tokens.bin"))

    with rejects("cache", str(tmp_path / "cache"), "full", InvalidData, where="words") as e:
        open_words(tmp_path, full)
    assert "\n" not in str(e.value)
    assert "$FORGE_CACHE" in str(e.value)
    (tmp_path / "cache/file").write_text("")
    entry = Entry.of(str(tmp_path / "cache/file/below"), "words", {})
    with rejects("cache", str(tmp_path / "cache/file/below"), "unwritable"):
        open_cached(entry, "train", "touch", write_words)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder(tmp_path):
    whole = open_words(tmp_path).fingerprint()
    (tmp_path / "cache").chmod(0o555)
    try:
        assert open_words(tmp_path).fingerprint() == whole
        with rejects("cache", str(tmp_path / "cache"), "unwritable"):
            open_cached(
                Entry.of(str(tmp_path / "cache"), "more", {}), "train", "touch", write_words
            )
    finally:
        (tmp_path / "cache").chmod(0o755)


def test_the_folder_is_that_of_the_table_or_the_environment_or_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "env"))
    assert Entry.of("mine", "a b/c:d.jsonl", {}).folder.parent == Path("mine").absolute()
    assert Entry.of(None, "x", {}).folder.parent == tmp_path / "env/tokens"
    assert Entry.of(None, "a b/c:d.jsonl", {}).folder.name.startswith("c_d.jsonl-")
    monkeypatch.delenv("FORGE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Entry.of(None, "x", {}).folder.parent == tmp_path / ".cache/forge/tokens"


def test_a_change_after_the_look_has_a_later_time_stamp(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a")
    seen = file_states([path], tmp_path)
    path.write_text("b")
    assert file_states([path], tmp_path) != seen


# ---- name = "text"


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/b.md").write_text("one\n\ntwo\n")
    lines = [json.dumps({"text": f"document {i} " * i}) for i in range(40)]
    (tmp_path / "notes/a.jsonl").write_text("\n".join(lines))
    return tmp_path / "notes"


def source_of(path, split="train", **table):
    return open_source(SourceConfig("text", str(path), split=split, text=TextConfig(**table)))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_text_is_read_as_prepare_writes_it(text, split):
    found = source_of(text, split, document="blank_line", validation_every=5)
    prepare(text, text.parent / "p", document="blank_line", validation_every=5)
    wanted = TokenFiles(text.parent / "p", split=split)
    assert found.fingerprint() == wanted.fingerprint()
    assert (found.read(0, found.num_tokens) == wanted.read(0, wanted.num_tokens)).all()
    assert (found.documents == wanted.documents).all()


def test_its_identity_is_its_content_and_not_its_path(text):
    first = source_of(text)
    moved = text.rename(text.parent / "moved")
    assert (
        source_of(moved).path == first.path or source_of(moved).fingerprint() == first.fingerprint()
    )
    os.utime(moved / "b.md", (1, 1))
    later = source_of(moved)
    assert later.path != first.path
    assert later.fingerprint() == first.fingerprint()


def test_changed_text_makes_a_new_entry(text):
    first = source_of(text)
    (text / "b.md").write_text("one\n\nTWO\n")
    second = source_of(text)
    assert first.path.is_dir()
    assert second.path != first.path
    assert second.fingerprint()["tokens"] != first.fingerprint()["tokens"]


def test_other_options_make_other_entries(text):
    options = [{}, {"document": "line"}, {"validation_every": 4}, {"validation_every": 5}]
    assert len({source_of(text, **some).path for some in options}) == len(options)


def test_folders_of_splits(text):
    with rejects("path", str(text), "no_splits", InvalidData):
        source_of(text, "validation")
    (text / "train").mkdir()
    with rejects("path", str(text), "no_split", InvalidData):
        source_of(text, "validation")
    (text / "train/t.txt").write_text("only this")
    assert source_of(text).num_tokens == len("only this") + 1
    (text / "validation").mkdir()
    with rejects("text.validation_every", 9, "mixed", InvalidData):
        source_of(text, validation_every=9)


def test_text_that_changes_meanwhile_is_rejected(text, monkeypatch):
    from forge_data.sources import text as module

    def slow(files, folder, **options):
        prepare(files, folder, **options)
        (text / "b.md").write_text("one\n\ntwo and more\n")

    monkeypatch.setattr(module, "prepare", slow)
    with rejects("", ..., "changed", InvalidData, where="b.md"):
        source_of(text)
    monkeypatch.undo()
    monkeypatch.setenv("FORGE_CACHE", str(text.parent / "cache"))
    assert "more" in bytes(
        source_of(text).read(0, 9000 and source_of(text).num_tokens).astype("u1")
    ).decode("latin1")


@pytest.mark.parametrize(
    ("content", "table", "problem"),
    [
        (b'{"text": 3}', {}, ("text", 3, "type")),
        (b'{"body": "x"}', {}, ("text", ..., "missing")),
        (b'{"text": " "}', {}, ("inputs", ..., "empty")),
        (b"", {}, ("inputs", ..., "empty")),
        (b'{"text": "\xff"}', {}, ("", ..., "encoding")),
        (b"PAR1 and so on", {}, ("", ..., "ending")),
        (b'{"text": "x"}', {"tokenizer": "none.json"}, ("tokenizer", "none.json", "not_found")),
    ],
)
def test_broken_text_is_one_line(tmp_path, monkeypatch, content, table, problem):
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_bytes(content)
    with rejects(*problem, InvalidData) as error:
        source_of(tmp_path / "a.jsonl", **table)
    assert "\n" not in str(error.value)
    assert all(path.suffix == ".lock" for path in (tmp_path / "cache").glob("tokens/*"))


def test_a_killed_tokenization_goes_on_and_leaves_nothing(text, monkeypatch):
    """Killed between two files, each a unit of its own."""
    from forge_data.prepare import pipeline

    wanted = source_of(text, cache=str(text.parent / "whole")).fingerprint()

    def run():
        assemble = pipeline.assemble
        pipeline.assemble = lambda *args, **more: os.kill(os.getpid(), signal.SIGKILL)
        try:
            source_of(text)
        finally:
            pipeline.assemble = assemble

    writer = FORK.Process(target=run)
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert list((text.parent / "cache/tokens").glob("notes-*"))
    assert source_of(text).fingerprint() == wanted
    tokens = text.parent / "cache/tokens"
    left = sorted(path.name.partition("-")[2][32:] for path in tokens.iterdir())
    assert left == ["", ".lock"]


def test_a_path_without_text(tmp_path):
    with rejects("path", str(tmp_path / "nowhere"), "not_found", InvalidData):
        source_of(tmp_path / "nowhere")

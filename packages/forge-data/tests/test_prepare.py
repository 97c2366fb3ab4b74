"""Text files to token files: right, atomic, and clear about bad input."""

import errno
import json
import tracemalloc

import pytest

from forge_data import ByteTokenizer, InvalidData, TokenFiles, verify
from forge_data.prepare import prepare, read
from forge_data.tokens.writer import smallest_dtype
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def documents(folder, split="train"):
    source = TokenFiles(folder, split=split)
    ends = [*source.documents[1:].tolist(), source.num_tokens]
    spans = zip(source.documents.tolist(), ends, strict=True)
    ids = [source.read(start, stop).tolist() for start, stop in spans]
    assert all(i[-1] == 256 for i in ids)
    return [ByteTokenizer().decode(i) for i in ids]


TEXT = "\none\r\ntwo\n\n  \nthree é\n"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("file", [TEXT]),
        ("line", ["one", "two", "three é"]),
        ("blank_line", ["one\r\ntwo", "three é"]),
    ],
)
def test_what_a_document_is(tmp_path, kind, expected):
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    prepare([tmp_path / "a.txt"], tmp_path / "out", document=kind)
    assert documents(tmp_path / "out") == expected


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_document_read_in_chunks_is_the_same_document(tmp_path, monkeypatch, size):
    (tmp_path / "a.txt").write_bytes(("\n \n" + TEXT * 3).encode())
    monkeypatch.setattr(read, "SLICE", size)
    prepare([tmp_path / "a.txt"], tmp_path / "out")
    assert documents(tmp_path / "out") == ["\n \n" + TEXT * 3]


def test_jsonl(tmp_path):
    lines = [json.dumps({"text": "one\ntwo", "n": 1}), "", json.dumps({"text": "three"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    prepare([tmp_path / "a.jsonl"], tmp_path / "out")
    assert documents(tmp_path / "out") == ["one\ntwo", "three"]


def test_folders_are_read_in_sorted_order_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.md", "a/c.txt", ".git/x.txt", "picture.png"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    prepare([tmp_path / "in"], tmp_path / "out")
    assert documents(tmp_path / "out") == ["a/c.txt", "a/z.md", "b.txt"]


def test_every_nth_document_is_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join("abcdefg"))
    result = prepare([tmp_path / "a.txt"], tmp_path / "out", document="line", validation_every=3)
    assert documents(tmp_path / "out") == list("abdeg")
    assert documents(tmp_path / "out", "validation") == list("cf")
    assert result.num_documents == {"train": 5, "validation": 2}
    assert result.num_tokens == {"train": 10, "validation": 4}


def test_same_text_same_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("hello\n" * 100)
    for name in ("one", "two"):
        prepare([tmp_path / "a.txt"], tmp_path / name, document="line")
    for file in ("tokens.bin", "documents.bin", "tokens.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_smallest_dtype_that_fits(vocab_size, dtype):
    assert smallest_dtype(vocab_size) == dtype


def test_memory_does_not_grow_with_the_file(tmp_path):
    (tmp_path / "big.txt").write_text("x" * 12_000_000)
    tracemalloc.start()
    prepare([tmp_path / "big.txt"], tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert TokenFiles(tmp_path / "out").num_tokens == 12_000_001
    assert peak < 60_000_000  # one piece of a MB as text, list, int64 and uint16


def test_progress_ends_at_the_total(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("word\n" * 1000)
    reports = []
    prepare(
        [tmp_path / "a.txt", tmp_path / "b.txt"],
        tmp_path / "out",
        progress=reports.append,
    )
    for stage in ("tokenize", "merge"):
        mine = [tuple(report[1:]) for report in reports if report.stage == stage]
        assert mine[0] == (0, 10_000, 0, 0)  # else nobody could tell how fast the first unit was
        assert mine[-1] == (10_000, 10_000, 2, 10_002)
        assert mine == sorted(mine)


BAD_INPUT = {
    "latin1": (b"caf\xe9 and more", {}, ("", ..., "encoding")),
    "empty": (b"", {}, ("inputs", ..., "empty")),
    "blank": (b" \n\n", {"document": "line"}, ("inputs", ..., "empty")),
    "one document": (b"text", {"validation_every": 2}, ("validation_every", 2, "empty_split")),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_text_is_rejected_and_leaves_nothing(tmp_path, name):
    content, arguments, problem = BAD_INPUT[name]
    (tmp_path / "a.txt").write_bytes(content)
    with rejects(*problem, InvalidData):
        prepare([tmp_path / "a.txt"], tmp_path / "out", **arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_where_a_byte_is_wrong_far_into_a_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\n" * 50_000 + b"\xff" + b"abc\n" * 50_000)
    for kind in ("file", "line", "blank_line"):
        with rejects("", ..., "encoding", InvalidData, where="200000"):
            prepare([tmp_path / "a.txt"], tmp_path / "out", document=kind)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": ', ("", ..., "not_json")),
        ('{"body": "x"}', ("text", ..., "missing")),
        ("[1]", ("", ..., "type")),
        ('{"text": 3}', ("text", 3, "type")),
    ],
)
def test_bad_jsonl_is_rejected_by_line(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with rejects(*problem, InvalidData, where="a.jsonl line 2"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"document": "page"}, ("document", "page", "unknown")),
        ({"validation_every": 1}, ("validation_every", 1, "range")),
        ({"validation_every": -3}, ("validation_every", -3, "range")),
        ({"eos": "</s>"}, ("eos", "</s>", "excludes")),
        ({"inputs": []}, ("inputs", ..., "missing")),
        ({"inputs": [""]}, ("inputs", "", "empty")),
        ({"output": ""}, ("output", "", "empty")),
    ],
)
def test_bad_arguments_are_rejected(tmp_path, arguments, problem):
    (tmp_path / "a.txt").write_text("text")
    with rejects(*problem) as error:
        prepare(**{"inputs": [tmp_path / "a.txt"], "output": tmp_path / "out", **arguments})
    assert not isinstance(error.value, InvalidData)


def test_missing_inputs_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with rejects("output", str(tmp_path / "a.txt" / "out"), "unwritable"):
        prepare([tmp_path / "a.txt"], tmp_path / "a.txt" / "out")
    with rejects("inputs", str(tmp_path / "nowhere"), "not_found", InvalidData):
        prepare([tmp_path / "nowhere"], tmp_path / "out")
    (tmp_path / "in").mkdir()
    with rejects("inputs", str(tmp_path / "in"), "no_files", InvalidData):
        prepare([tmp_path / "in"], tmp_path / "out")


def test_an_existing_output_is_only_replaced_when_asked_and_when_the_new_one_is_complete(tmp_path):
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "bad.txt").write_bytes(b"new\xff")
    prepare([tmp_path / "a.txt"], tmp_path / "out")
    with rejects("output", str(tmp_path / "out"), "exists"):
        prepare([tmp_path / "a.txt"], tmp_path / "out")
    with rejects("", ..., "encoding", InvalidData, where="bad.txt"):
        prepare([tmp_path / "bad.txt"], tmp_path / "out", overwrite=True)
    assert documents(tmp_path / "out") == ["old"]
    (tmp_path / "a.txt").write_text("new")
    prepare([tmp_path / "a.txt"], tmp_path / "out", overwrite=True)
    assert documents(tmp_path / "out") == ["new"]
    assert {p.name for p in tmp_path.iterdir()} == {"a.txt", "bad.txt", "out"}


def test_what_is_not_token_files_is_never_overwritten(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("meow")
    with rejects("output", str(tmp_path / "photos"), "no_tokens"):
        prepare([tmp_path / "a.txt"], tmp_path / "photos", overwrite=True)
    assert (tmp_path / "photos" / "cat.jpg").exists()


def test_an_input_inside_the_output_is_not_deleted(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    prepare([tmp_path / "a.txt"], tmp_path / "out")
    (tmp_path / "out" / "b.txt").write_text("more")
    with rejects("inputs", str(tmp_path / "out" / "b.txt"), "inside"):
        prepare([tmp_path / "out" / "b.txt"], tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "b.txt").exists()


def test_an_interrupt_leaves_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("text")

    def stop(progress):
        raise KeyboardInterrupt("in_progress")

    with pytest.raises(KeyboardInterrupt, match="in_progress"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", progress=stop)
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_when_the_last_rename_fails_the_old_files_come_back(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("old")
    prepare([tmp_path / "a.txt"], tmp_path / "out")
    path_type = type(tmp_path)
    rename = path_type.rename

    def failing(self, target):
        if self.name.startswith(".out.tmp-"):
            raise OSError(errno.EIO, "no")
        return rename(self, target)

    monkeypatch.setattr(path_type, "rename", failing)
    with pytest.raises(OSError, match=str(errno.EIO)):
        prepare([tmp_path / "a.txt"], tmp_path / "out", overwrite=True)
    assert verify(tmp_path / "out") == 4
    assert {p.name for p in tmp_path.iterdir()} == {"a.txt", "out"}


def test_F149_only_a_leading_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("$HOME", "~x", "[a]"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
        prepare(f"~/{name}", f"~/out {name}")
        assert documents(tmp_path / f"out {name}") == documents(f"~/out {name}") == [name]
        prepare(name, f"out of {name}")  # relative
        assert verify(f"~/out of {name}") == len(name) + 1

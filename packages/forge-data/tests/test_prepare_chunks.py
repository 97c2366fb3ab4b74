"""Units, workers, shards and kills: none of them changes a byte of the output."""

import hashlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from forge_data import ByteTokenizer, InvalidData, TokenFiles, verify
from forge_data.prepare import chunks, merge, plan, prepare, read
from forge_data.prepare import workers as chunk_workers
from forge_data.prepare.assemble import find_duplicates
from forge_data.prepare.read import find_inputs
from forge_data.tokens.writer import TokenWriter
from forge_testing.durability import synced_renames
from forge_testing.problems import ANY, assert_problem, rejects

pytestmark = pytest.mark.lane("test")


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(plan, "SMALLEST", 1 << 10)
    monkeypatch.setattr(plan, "LARGEST", 1 << 10)


@pytest.fixture
def corpus(tmp_path):
    """Two files of JSON lines, one of lines that ends without a line end, and small ones; some texts are there twice."""
    draw = random.Random(0)
    texts = [
        "".join(draw.choices("abc é\n\t🙂", k=draw.choice([1, 9, 60, 200]))) + str(i)
        for i in range(90)
    ]
    folder = tmp_path / "in"
    folder.mkdir()
    for name, part in (("a", texts[:60] + texts[:7]), ("b", texts[50:])):
        lines = [json.dumps({"text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(part)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for i in range(5):
        (folder / f"c{i}.txt").write_text("one line\n \nand another")
    return folder


def read_documents(folder):
    """The texts of a corpus, one by one, without forge_data."""
    for file in sorted(folder.iterdir()):
        if file.suffix == ".jsonl":
            texts = [json.loads(line)["text"] for line in file.read_text().split("\n")]
            yield from (text for text in texts if text.strip())
        else:
            yield file.read_text()


def reference(texts, folder, validation_every=0):
    """Token files, one document after the other through one writer; the sidecars' names and contents."""
    folder.mkdir()
    names = ("train", "validation") if validation_every else ("",)
    tokenizer = ByteTokenizer()
    writers = [TokenWriter(folder / name, 257, tokenizer.spec()) for name in names]
    for i, text in enumerate(texts):
        held_out = validation_every and i % validation_every == validation_every - 1
        writers[bool(held_out)].add([np.array([*text.encode(), 256])])
    for writer in writers:
        writer.finish()
    return content(folder)


def content(folder):
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "statistics.json"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.mark.parametrize("every", [0, 4])
def test_F197_the_bytes_are_those_of_one_writer_in_chunks_of_any_size(
    tmp_path, corpus, every, monkeypatch
):
    expected = reference(read_documents(corpus), tmp_path / "expected", every)
    for module, name in (
        (chunks, "_BATCH"),
        (chunks, "_AT_ONCE"),
        (plan, "_SCAN"),
        (read, "SLICE"),
    ):
        monkeypatch.setattr(module, name, 3)
    prepare(corpus, tmp_path / "out", validation_every=every)
    assert content(tmp_path / "out") == expected


@pytest.mark.lane("quick")
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("every", [0, 4])
def test_the_bytes_are_those_of_one_writer_whatever_the_workers(tmp_path, corpus, workers, every):
    expected = reference(read_documents(corpus), tmp_path / "expected", every)
    prepare(corpus, tmp_path / "out", workers=workers, validation_every=every)
    assert content(tmp_path / "out") == expected
    assert {p.name for p in tmp_path.iterdir()} == {"in", "expected", "out"}


def settings(**changes):
    values = {"tokenizer": {"name": "byte"}, "vocab_size": 257, "document": "file"}
    rest = {"text_field": "text", "validation_every": 0, "validation_fraction": 0.0}
    return plan.Settings(**{**values, **rest, "deduplicate": False, **changes})


@pytest.mark.parametrize("document", ["line", "blank_line"])
def test_chunks_are_ranges_that_end_where_documents_end(tmp_path, document):
    text = "".join(random.Random(1).choices(["\n", "\r\n", "\r", "word", "é", " ", "\n\n"], k=8000))
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    units = plan.make_plan([path], settings(document=document)).chunks
    ranges = [part.range for unit in units for part in unit.ranges]
    assert len(ranges) > 8
    assert [ranges[0][0], *(r[1] for r in ranges)] == [*(r[0] for r in ranges), path.stat().st_size]
    found = [
        piece.text
        for part in ranges
        for piece in chunks.read_documents(path, document, "text", lambda done: None, part)
    ]
    whole = chunks.read_documents(path, document, "text", lambda done: None)
    assert found == [piece.text for piece in whole]


ENDINGS = {"text": "txt", "records": "jsonl", "csv": "csv", "parquet": "parquet"}


@pytest.mark.parametrize("kind", get_args(read.Kind))
def test_files_of_each_kind_are_divided_where_documents_end(tmp_path, kind):
    """Lines of text and records end documents; a line of csv may end inside of a quoted field."""
    path = tmp_path / f"a.{ENDINGS[kind]}"
    if kind == "parquet":
        pytest.importorskip("pyarrow")
        from pyarrow import parquet, table

        parquet.write_table(table({"text": ["a" * 900] * 4}), path, row_group_size=1, compression="none", use_dictionary=False)  # fmt: skip
    else:
        path.write_text(('"a\nb"\n' if kind == "csv" else "some text\n") * 400)
    units = plan.make_plan([path], settings(document="line")).chunks
    assert read.format_of(path).kind == kind
    assert (len(units) > 1) == (kind != "csv")
    assert sum(unit.size for unit in units) == path.stat().st_size


def test_one_line_without_an_end_is_one_chunk(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 200_000)
    (unit,) = plan.make_plan([tmp_path / "a.txt"], settings(document="line")).chunks
    assert unit.ranges[0].range == (0, 200_000)


def test_small_files_share_a_chunk_and_sizes_add_up(corpus):
    found = plan.make_plan(find_inputs([corpus]), settings())
    assert len(found.chunks[-1].ranges) == 6  # and the last bytes of a file
    assert sum(unit.size for unit in found.chunks) == sum(
        file.stat().st_size for file in corpus.iterdir()
    )
    assert plan.Plan.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_parquet_is_divided_at_row_groups(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    texts = [f"{i} " * 40 for i in range(200)]
    table = arrow.table({"n": list(range(200)), "text": texts})
    pytest.importorskip("pyarrow.parquet").write_table(
        table, tmp_path / "a.parquet", row_group_size=9
    )
    units = plan.make_plan([tmp_path / "a.parquet"], settings()).chunks
    ranges = [part.range for unit in units for part in unit.ranges]
    assert len(ranges) > 8
    assert [0, *(r[1] for r in ranges)] == [*(r[0] for r in ranges), 23]
    assert sum(unit.size for unit in units) == (tmp_path / "a.parquet").stat().st_size
    prepare(tmp_path / "a.parquet", tmp_path / "out", workers=2)
    assert content(tmp_path / "out") == reference(texts, tmp_path / "expected")


@pytest.mark.parametrize("shards", [1, 3, 40])
def test_each_chunk_has_one_shard_and_shards_are_consecutive(corpus, shards):
    found = plan.make_plan(find_inputs([corpus]), settings(), shards)
    parts = [found.of_shard(shard) for shard in range(shards)]
    assert [unit for part in parts for unit in part] == list(found.chunks)


def test_what_is_done_is_not_done_again(tmp_path, corpus, monkeypatch):
    calls = []
    write_chunk = chunk_workers.write_chunk

    def counted(folder, unit, *more):
        calls.append(unit)
        if len(calls) == 4:
            raise KeyboardInterrupt("unit_4")
        return write_chunk(folder, unit, *more)

    monkeypatch.setattr(chunk_workers, "write_chunk", counted)
    with pytest.raises(KeyboardInterrupt, match="unit_4"):
        prepare(corpus, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    first, second, *_ = sorted((tmp_path / "out.parts").glob("*.unit"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-3])  # a damaged one is done again too
    total = len(plan.make_plan(find_inputs([corpus]), settings()).chunks)
    reports = []
    prepare(corpus, tmp_path / "out", progress=reports.append)
    assert len(calls) == 4 + total - 1
    assert reports[0].done > 1000  # what was there counts
    assert content(tmp_path / "out") == reference(read_documents(corpus), tmp_path / "expected")
    assert {p.name for p in tmp_path.iterdir()} == {"in", "expected", "out"}


def test_a_changed_file_is_read_again_and_the_others_are_not(tmp_path, corpus, monkeypatch):
    (corpus / "c4.txt").write_bytes(b"\xff" * 2000)
    with rejects("", ..., "encoding", InvalidData, where="c4.txt"):
        prepare(corpus, tmp_path / "out")
    done = {p.name for p in (tmp_path / "out.parts").glob("*.unit")}
    (corpus / "c4.txt").write_text("good")
    calls = []
    write_chunk = chunk_workers.write_chunk
    monkeypatch.setattr(
        chunk_workers,
        "write_chunk",
        lambda f, u, *more: calls.append(u) or write_chunk(f, u, *more),
    )
    prepare(corpus, tmp_path / "out")
    assert done
    assert not done & {f"{unit.key}.unit" for unit in calls}
    assert content(tmp_path / "out") == reference(read_documents(corpus), tmp_path / "expected")


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_error_of_the_plan_is_reported_whatever_the_workers(
    tmp_path, monkeypatch, workers
):
    for i in range(8):
        (tmp_path / f"{i}.txt").write_bytes(b"fine\n" * 250 + (b"\xff" if i in (3, 4, 6) else b""))
    write_chunk = chunk_workers.write_chunk

    def late(folder, unit, *more):
        """With several workers the error of 3.txt comes after that of 4.txt."""
        name = Path(unit.ranges[0].path).name
        while workers > 1 and name == "3.txt" and not (tmp_path / "failed").exists():
            time.sleep(0.01)
        try:
            return write_chunk(folder, unit, *more)
        finally:
            if name == "4.txt":
                (tmp_path / "failed").touch()

    monkeypatch.setattr(chunk_workers, "write_chunk", late)
    with rejects("", ..., "encoding", InvalidData, where="3.txt"):
        prepare(sorted(tmp_path.glob("*.txt")), tmp_path / "out", workers=workers)
    assert multiprocessing.active_children() == []


def damage(path, at):
    whole = bytearray(path.read_bytes())
    whole[at] ^= 1
    path.write_bytes(whole)


def test_damaged_chunks_do_not_become_tokens(tmp_path, corpus):
    prepare(corpus, tmp_path / "out", shard=(0, 1))
    unit = sorted((tmp_path / "out.parts").glob("*.unit"))[0]
    damage(unit, 5)
    with rejects("", ..., "damaged", InvalidData):
        merge(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    unit.unlink()
    with rejects("", ..., "incomplete", InvalidData, where="0/1 (1"):
        merge(tmp_path / "out")


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_worker_that_dies_is_named_and_its_chunk_begun_again_once(
    tmp_path, corpus, monkeypatch, caplog, deaths
):
    target = plan.make_plan(find_inputs([corpus]), settings()).chunks[2].ranges
    write_chunk, parent = chunk_workers.write_chunk, os.getpid()

    def dying(folder, unit, *more):
        if unit.ranges == target and len(list(tmp_path.glob("death*"))) < deaths:
            (tmp_path / f"death{os.getpid()}").touch()
            assert os.getpid() != parent
            os.kill(os.getpid(), signal.SIGKILL)
        return write_chunk(folder, unit, *more)

    monkeypatch.setattr(chunk_workers, "write_chunk", dying)
    if deaths == 1:
        prepare(corpus, tmp_path / "out", workers=2)
        assert content(tmp_path / "out") == reference(read_documents(corpus), tmp_path / "expected")
    else:
        with rejects("", ..., "killed", InvalidData, where="a.jsonl"):
            prepare(corpus, tmp_path / "out", workers=2)
    (death, *_) = sorted(tmp_path.glob("death*"), key=os.path.getmtime)
    named = [r.args for r in caplog.records if r.args and r.args[0] == int(death.name[5:])]
    ((_, why, unit),) = named
    assert "SIGKILL" in why
    assert str(corpus / "a.jsonl") in str(unit)
    assert multiprocessing.active_children() == []


# shards


@pytest.mark.lane("quick")
@pytest.mark.parametrize("options", [{}, {"validation_every": 4}, {"deduplicate": True}])
def test_merged_shards_are_the_single_run(tmp_path, corpus, options):
    prepare(corpus, tmp_path / "one", validation_fraction=0.0, **options)
    for shard in (2, 0, 1):
        result = prepare(corpus, tmp_path / "out", shard=(shard, 3), workers=1 + shard, **options)
        assert result.num_tokens[f"shard {shard}/3"] > 1000
        if shard != 1:
            with rejects("", ..., "incomplete", InvalidData, where=" 1/3 ("):
                merge(tmp_path / "out")
    merged = merge(tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "one")
    statistics = [(tmp_path / name / "statistics.json").read_text() for name in ("one", "out")]
    assert statistics[0] == statistics[1]
    assert json.loads(statistics[0]) == merged.statistics
    assert {p.name for p in tmp_path.iterdir()} == {"in", "one", "out"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"deduplicate": True}, ("", ["deduplicate (False, now True)"], "mismatch")),
        ({"text_field": "body"}, ("", ["text_field (text, now body)"], "mismatch")),
        ({"shard": (1, 3)}, ("", ["shards (2, now 3)"], "mismatch")),
        ({}, ("", ANY, "mismatch")),
    ],
)
def test_shards_of_other_commands_do_not_mix(tmp_path, corpus, change, problem, caplog):
    prepare(corpus, tmp_path / "out", shard=(0, 2))
    if not change:
        os.utime(corpus / "c1.txt", (1, 1))
    with rejects(*problem):
        prepare(corpus, tmp_path / "out", **{"shard": (1, 2), **change})
    assert not caplog.records


def test_another_tokenizer_or_file_of_a_shard_is_named(tmp_path, corpus):
    library = pytest.importorskip("tokenizers")
    for name in ("words", "others"):
        words = library.Tokenizer(library.models.WordLevel({"a": 1, name: 0}, unk_token=name))
        words.save(str(tmp_path / f"{name}.json"))
    options = {"tokenizer": str(tmp_path / "words.json"), "eos": "a"}
    prepare(corpus, tmp_path / "out", shard=(0, 2), **options)
    with rejects("", code="mismatch", where="tokenizer.fingerprint ("):
        prepare(
            corpus,
            tmp_path / "out",
            shard=(1, 2),
            **{**options, "tokenizer": str(tmp_path / "others.json")},
        )
    (corpus / "c1.txt").unlink()
    (corpus / "new.txt").write_text("new")
    with rejects("", code="mismatch", where="c1.txt"):
        prepare(corpus, tmp_path / "out", shard=(1, 2), **options)


def test_a_shard_without_work_is_reported(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("one")
    prepare(tmp_path / "a.txt", tmp_path / "out", shard=(0, 3))
    assert [record.args for record in caplog.records] == [(0, 3, 1, "")]
    prepare(tmp_path / "a.txt", tmp_path / "out", shard=(1, 3))
    assert len(caplog.records) == 1


def test_merge_needs_parts(tmp_path, corpus):
    with rejects("", ..., "no_plan", InvalidData, where="out.parts"):
        merge(tmp_path / "out")
    (tmp_path / "out.parts").mkdir()
    (tmp_path / "out.parts" / "photo.jpg").write_text("meow")
    with rejects("", ..., "foreign", where="out.parts"):
        prepare(corpus, tmp_path / "out")
    (tmp_path / "out.parts" / "plan.json").write_text("[1")
    with rejects("", ..., "damaged", InvalidData, where="plan.json"):
        merge(tmp_path / "out")
    assert (tmp_path / "out.parts" / "photo.jpg").exists()


@pytest.mark.lane("quick")
def test_the_tokenizer_of_the_shards_is_kept_with_them(tmp_path, corpus):
    library = pytest.importorskip("tokenizers")
    words = library.Tokenizer(library.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "words.json"))
    options = {"tokenizer": str(tmp_path / "words.json"), "eos": "a"}
    prepare(corpus, tmp_path / "one", workers=2, **options)
    prepare(corpus, tmp_path / "out", shard=(0, 1), **options)
    words.save(str(tmp_path / "words.json"), pretty=False)
    (tmp_path / "out.parts" / "tokenizer.json").rename(tmp_path / "kept.json")
    with rejects("", ..., "tokenizer", InvalidData, where="tokenizer.json"):
        merge(tmp_path / "out")
    (tmp_path / "kept.json").rename(tmp_path / "out.parts" / "tokenizer.json")
    merge(tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "one")


# splits, duplicates, statistics


def test_a_fraction_is_held_out_only_by_the_text(tmp_path, corpus):
    texts = list(read_documents(corpus))
    prepare(corpus, tmp_path / "out", validation_fraction=0.3)

    def held_out(text):
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        return int.from_bytes(digest[:8], "big") < 0.3 * 2**64

    for split, wanted in (("train", False), ("validation", True)):
        expected = [text for text in texts if held_out(text) is wanted]
        assert len(expected) > 20
        assert documents(TokenFiles(tmp_path / "out", split=split)) == expected


def documents(source):
    ends = [*source.documents[1:].tolist(), source.num_tokens]
    spans = zip(source.documents.tolist(), ends, strict=True)
    return [ByteTokenizer().decode(source.read(a, b).tolist()) for a, b in spans]


@pytest.mark.lane("quick")
@pytest.mark.parametrize("every", [0, 4])
def test_copies_of_earlier_documents_are_dropped(tmp_path, corpus, every):
    texts = list(read_documents(corpus))
    once = list(dict.fromkeys(texts))
    result = prepare(corpus, tmp_path / "out", deduplicate=True, validation_every=every, workers=2)
    assert content(tmp_path / "out") == reference(once, tmp_path / "expected", every)
    dropped = result.statistics["duplicates"]
    assert dropped["documents"] == len(texts) - len(once) > 15
    assert dropped["bytes"] == sum(len(t.encode()) for t in texts) - sum(
        len(t.encode()) for t in once
    )


def test_duplicates_are_those_of_a_set_and_half_a_digest_is_not_enough():
    draw = np.random.default_rng(0)
    table = draw.integers(0, 3, (2000, 2)).astype(np.uint64)  # halves meet often, wholes less
    table[::7] = draw.integers(0, 1 << 60, (286, 2))
    digests = np.frombuffer(table.tobytes(), "V16")
    seen, expected = set(), []
    for i, digest in enumerate(digests.tolist()):
        if digest in seen:
            expected.append(i)
        seen.add(digest)
    found = find_duplicates(lambda: np.array_split(digests, 13), 2000)
    assert found.tolist() == expected
    assert find_duplicates(lambda: [digests[:0]], 0).tolist() == []


def test_statistics_are_those_of_all_lengths(tmp_path, corpus):
    texts = [text.encode() for text in read_documents(corpus)]
    lengths = np.array([len(text) + 1 for text in texts])
    (found,) = prepare(corpus, tmp_path / "out").statistics["splits"].values()
    assert (found["documents"], found["tokens"]) == (len(texts), lengths.sum())
    assert found["bytes"] == sum(map(len, texts))
    assert found["tokens_per_byte"] == pytest.approx(found["tokens"] / found["bytes"], abs=1e-6)
    for q, length in found["length_quantiles"].items():
        assert length == np.quantile(lengths, float(q), method="inverted_cdf"), q


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"validation_fraction": 1.0}, ("validation_fraction", 1.0, "range")),
        (
            {"validation_fraction": 0.1, "validation_every": 3},
            ("validation_fraction", 0.1, "excludes"),
        ),
        ({"workers": 0}, ("workers", 0, "range")),
        ({"shard": (3, 3)}, ("shard", (3, 3), "range")),
    ],
)
def test_options_that_cannot_be_are_rejected(tmp_path, corpus, arguments, problem):
    with rejects(*problem):
        prepare(corpus, tmp_path / "out", **arguments)
    assert not (tmp_path / "out.parts").exists()


# kills


DEDUPLICATED = {"deduplicate": True, "validation_fraction": 0.2, "document": "line"}


def in_units(work, *arguments, **options):
    """In a process of its own group, in units of 16 KiB."""
    os.setsid()
    plan.SMALLEST = plan.LARGEST = 1 << 14
    work(*arguments, **options)


def run_prepare(source, output):
    in_units(prepare, source, output, workers=2, overwrite=True, **DEDUPLICATED)


def start(*arguments):
    """A process of its own group; forked, as imports would take longer than the work."""
    process = multiprocessing.get_context("fork").Process(target=run_prepare, args=arguments)
    process.start()
    return process


def children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:
        return []


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def write_lines(folder, draw):
    """Eight files of 3000 lines, some of which occur again."""
    folder.mkdir()
    for i in range(8):
        lines = [f"{draw.randrange(300)} {draw.random()} words" for _ in range(3000)]
        (folder / f"{i}.txt").write_text("\n".join(lines))


def kill_again_and_again(tmp_path, times, seed):
    """Kill a prepare with all its processes after random times, `times` times; then let it end."""
    draw = random.Random(seed)
    write_lines(tmp_path / "in", draw)
    one, out = tmp_path / "one", tmp_path / "out"
    began = time.monotonic()
    process = start(tmp_path / "in", one)
    process.join(60)
    assert process.exitcode == 0
    seconds = time.monotonic() - began
    killed, found = 0, set()
    while killed < times:
        process = start(tmp_path / "in", out)
        process.join(draw.uniform(0, seconds * (0.3 if killed % 2 else 1.1)))
        workers = children(process.pid)
        if process.is_alive():
            group = os.getpgid(process.pid)
            if killed % 3 and group == process.pid:  # all at once, as a scheduler does it
                os.killpg(group, signal.SIGKILL)
            else:
                process.kill()
            process.join()
            killed += process.exitcode == -signal.SIGKILL
        deadline = time.monotonic() + 10
        while any(map(lives, workers)) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not any(map(lives, workers))  # they end with their parent
        if out.exists():
            verify(out)  # complete whenever it is there
        found.add(len(list((tmp_path / "out.parts").glob("*.unit"))))
    process = start(tmp_path / "in", out)
    process.join(60)
    assert process.exitcode == 0
    assert tree(out) == tree(one)
    assert {p.name for p in tmp_path.iterdir()} == {"in", "one", "out"}
    return found


DISK = (
    (Path, "rename"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (Path, "rmdir"), (os, "fsync"), (os, "unlink"), (os, "rmdir"),
)  # fmt: skip


def run_until(call, work, *arguments, **options):
    """Work that kills itself before its `call`-th change of the disk."""
    count = itertools.count(1)

    def dying(change):
        def wrapped(*arguments, **options):
            if next(count) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **options)

        return wrapped

    for module, name in DISK:
        setattr(module, name, dying(getattr(module, name)))
    work(*arguments, **options)


LINES = {"document": "line", "validation_every": 3}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_before_any_change_of_the_disk_the_rerun_ends_with_the_same_bytes(
    tmp_path, overwrite
):
    source, out, parts = tmp_path / "in.txt", tmp_path / "out", tmp_path / "out.parts"
    source.write_text("".join(f"{i} some words\n" for i in range(200)))
    prepare(source, tmp_path / "one", **LINES)
    fork = multiprocessing.get_context("fork").Process
    states = set()
    for call in itertools.count(1):
        if overwrite:
            prepare(source, out, document="line")
        keys = {**LINES, "overwrite": overwrite}
        process = fork(target=run_until, args=(call, prepare, source, out), kwargs=keys)
        process.start()
        process.join(60)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        states.add((out.exists(), (tmp_path / "out.parts.finished.json").exists(), parts.exists()))
        prepare(source, out, **keys)
        assert tree(out) == tree(tmp_path / "one")
        assert {p.name for p in tmp_path.iterdir()} == {"in.txt", "one", "out"}
        shutil.rmtree(out)
    assert call > 30
    assert states >= {(overwrite, False, True), (False, True, True), (True, True, True)}
    assert (True, True, False) in states


def prepare_in_shards(source, output):
    for index in (1, 0):
        prepare(source, output, shard=(index, 2), **LINES)
    merge(output)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_shards_killed_before_any_change_of_the_disk_merge_to_the_bytes_of_one_run(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(plan, "SMALLEST", 1 << 10)
    monkeypatch.setattr(plan, "LARGEST", 1 << 10)
    out, parts = tmp_path / "out", tmp_path / "out.parts"
    (tmp_path / "in").mkdir()
    for name in "abc":  # two units each
        (tmp_path / "in" / name).with_suffix(".txt").write_text(f"{name} some words\n" * 120)
    prepare(tmp_path / "in", tmp_path / "one", **LINES)
    fork, states = multiprocessing.get_context("fork").Process, set()
    for call in itertools.count(1):
        process = fork(target=run_until, args=(call, prepare_in_shards, tmp_path / "in", out))
        process.start()
        process.join(60)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        mark = tmp_path / "out.parts.finished.json"
        states.add((out.exists(), mark.exists(), parts.exists()))
        if not out.exists():
            prepare_in_shards(tmp_path / "in", out)
        elif parts.exists() or mark.exists():
            merge(out)  # removes what the killed one left
        assert tree(out) == tree(tmp_path / "one")
        left = {p.name for p in tmp_path.iterdir()} - {"in", "one", "out"}
        assert left <= {"out.parts.lock"}
        for path in [out, *(tmp_path / name for name in left)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert call > 60
    assert states >= {(False, False, True), (False, True, True), (True, True, True)}


def kill_at_random(processes, draw, seconds):
    """Kill each of some processes of their own groups after a random time; how many were alive. Their exit codes are
    0 or that of the kill."""
    killed = 0
    for process in processes:
        process.join(draw.uniform(0, seconds))
        if process.is_alive() and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        elif process.is_alive():
            process.kill()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        killed += process.exitcode != 0
    return killed


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_shards_at_once_and_merges_killed_at_random_instants_end_with_the_same_bytes(tmp_path):
    source, out, draw = tmp_path / "in", tmp_path / "out", random.Random(3)
    write_lines(source, draw)
    fork = multiprocessing.get_context("fork").Process

    def begin(work, *arguments, **options):
        process = fork(target=in_units, args=(work, *arguments), kwargs=options)
        process.start()
        return process

    began = time.monotonic()
    process = begin(prepare, source, tmp_path / "one", workers=2, **DEDUPLICATED)
    process.join(60)
    seconds, killed = time.monotonic() - began, 0
    while killed < 9:
        shards = [begin(prepare, source, out, shard=(i, 3), **DEDUPLICATED) for i in range(3)]
        killed += kill_at_random(shards, draw, seconds / 6)
    for index in range(3):
        prepare_in_units = begin(prepare, source, out, shard=(index, 3), **DEDUPLICATED)
        prepare_in_units.join(60)
        assert prepare_in_units.exitcode == 0
    for _ in range(5):
        if not out.exists():
            kill_at_random([begin(merge, out)], draw, seconds / 3)
    if (tmp_path / "out.parts").exists():
        merge(out)
    assert tree(out) == tree(tmp_path / "one")
    left = {p.name for p in tmp_path.iterdir()} - {"in", "one", "out"}
    assert left <= {"out.parts.lock"}


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_at_random_instants_the_bytes_are_those_of_an_undisturbed_run(tmp_path):
    assert len(kill_again_and_again(tmp_path, 6, seed=0)) > 2  # kills fell in different places


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_fifty_times_the_bytes_are_those_of_an_undisturbed_run(tmp_path):
    assert len(kill_again_and_again(tmp_path, 50, seed=1)) > 6


def hang(tmp_path, **options):
    """A prepare of `in` into `out` that stays in its middle."""
    begun = multiprocessing.Event()

    def stuck():
        def wait(progress):
            begun.set()
            time.sleep(600)

        prepare(tmp_path / "in", tmp_path / "out", progress=wait, **options)

    process = multiprocessing.get_context("fork").Process(target=stuck)
    process.start()
    assert begun.wait(60)
    return process


def end(process):
    process.kill()
    process.join()


@pytest.mark.lane("quick")
@pytest.mark.parametrize("other", [None, (0, 2)])
def test_a_second_command_on_one_output_is_rejected_while_the_first_runs(tmp_path, corpus, other):
    """One that was killed in the middle keeps nobody out."""
    process = hang(tmp_path, shard=other)
    for attempt in [other, None]:  # the same command, and one of the whole
        with rejects("", ..., "locked", where=f" {process.pid} "):
            prepare(corpus, tmp_path / "out", shard=attempt)
    assert (tmp_path / "out.parts/plan.json").is_file()
    if other is not None:
        prepare(corpus, tmp_path / "out", shard=(1, 2))  # another shard may go on
        with rejects("", ..., "locked", where=f" {process.pid} "):
            merge(tmp_path / "out")
    end(process)
    prepare(corpus, tmp_path / "out", shard=other)
    if other is not None:
        merge(tmp_path / "out")
    prepare(corpus, tmp_path / "alone")
    assert content(tmp_path / "out") == content(tmp_path / "alone")
    assert {p.name for p in tmp_path.iterdir()} == {"in", "out", "alone"}


def test_a_shard_waits_for_one_that_does_all_shards(tmp_path, corpus):
    process = hang(tmp_path)
    with rejects("", ..., "locked", where=f" {process.pid} "):
        prepare(corpus, tmp_path / "out", shard=(0, 2))
    end(process)


def test_a_rejected_command_leaves_nothing(tmp_path, corpus):
    """Beside an output that is there, also where an empty folder or the lock of a dead process was left."""
    prepare(corpus, tmp_path / "out")
    for left in [None, "out.parts", "out.parts.lock"]:
        if left is not None:
            (tmp_path / "out.parts").mkdir()
            (tmp_path / left).mkdir(exist_ok=True) if left == "out.parts" else (
                tmp_path / left
            ).touch()
        with rejects("output", str(tmp_path / "out"), "exists"):
            prepare(corpus, tmp_path / "out")
        assert {p.name for p in tmp_path.iterdir()} == {"in", "out"}
    with rejects("", ..., "no_plan", InvalidData):
        merge(tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"in", "out"}


def test_F172_of_two_threads_with_one_output_the_second_is_rejected(tmp_path, corpus):
    """It leaves the parts and the lock of the first alone, however often it tries."""
    refused = []

    def second(_):
        for _ in range(2):
            with ThreadPoolExecutor(1) as pool:
                refused.append(pool.submit(prepare, corpus, tmp_path / "out").exception())

    prepare(corpus, tmp_path / "out", progress=second)
    assert len(refused) > 1
    for error in refused:
        assert_problem(error, "", ..., "locked")
        assert f" {os.getpid()} " in str(error)
    prepare(corpus, tmp_path / "alone")
    assert content(tmp_path / "out") == content(tmp_path / "alone")


def test_a_merge_does_not_replace_its_inputs(tmp_path, corpus):
    prepare(corpus, tmp_path / "out", shard=(0, 1))
    prepare(corpus / "a.jsonl", tmp_path / "old")
    corpus.rename(tmp_path / "elsewhere")
    (tmp_path / "old").rename(tmp_path / "in")
    (tmp_path / "out.parts").rename(tmp_path / "in.parts")
    with rejects("inputs", str(corpus / "a.jsonl"), "inside"):
        merge(tmp_path / "in", overwrite=True)


@pytest.mark.lane("quick")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["a.jsonl", "c1.txt"])
def test_a_file_that_changes_meanwhile_is_rejected(tmp_path, corpus, monkeypatch, name, workers):
    """Its units were planned for what it was: ranges of another file end anywhere."""
    read = chunks.read_documents

    def changing(path, *more):
        if path.name == name and not path.read_bytes().startswith(b" "):
            path.write_bytes(b" " + path.read_bytes())
        return read(path, *more)

    with monkeypatch.context() as patch:
        patch.setattr(chunks, "read_documents", changing)
        with rejects("", ..., "changed", InvalidData, where=name):
            prepare(corpus, tmp_path / "out", workers=workers)
    prepare(corpus, tmp_path / "out")
    assert content(tmp_path / "out") == reference(read_documents(corpus), tmp_path / "expected")


@pytest.mark.lane("quick")
def test_F197_files_are_on_the_disk_before_their_folder_is_published(tmp_path, corpus):
    library = pytest.importorskip("tokenizers")
    words = library.Tokenizer(library.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words.save(str(tmp_path / "words.json"))
    options = {"tokenizer": str(tmp_path / "words.json"), "eos": "a", "validation_every": 4}
    with synced_renames() as moved:
        for overwrite in (False, True):
            prepare([corpus], tmp_path / "out", overwrite=overwrite, **options)
        for index in (0, 1):
            prepare([corpus], tmp_path / "parts", shard=(index, 2), **options)
        merge(tmp_path / "parts")
    assert (moved.count("out"), moved.count("parts")) == (2, 1)

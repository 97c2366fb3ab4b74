"""Formats of other projects: what obvious writers wrote is read, and each kind of damage is one line."""

import contextlib
import json
import os
import pickle
import resource
import struct

import numpy as np
import pytest

from forge_data import (
    InvalidData,
    Loader,
    PackedStream,
    SourceConfig,
    TrainingSourceConfig,
    open_source,
)
from forge_data.tokens import raw, raw_formats
from forge_testing.problems import ANY, rejects

pytestmark = pytest.mark.lane("test")

EOT = 99
DOCUMENTS = [[5, 6, 7, EOT], [8, EOT], [300, 2, 3, 4, 5, EOT], [1, 1, EOT]]
IDS = [i for document in DOCUMENTS for i in document]
STARTS = [0, 4, 6, 12]
CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}


# ---- reference writers, of one document after another


def write_megatron(folder, documents=DOCUMENTS, dtype="uint16", sequences_of=lambda d: [d]):
    sequences = [s for d in documents for s in sequences_of(d)]
    item = np.dtype(dtype).itemsize
    with (folder / "text.bin").open("wb") as file:
        for sequence in sequences:
            file.write(np.array(sequence, dtype).tobytes())
    lengths = [len(s) for s in sequences]
    pointers = [item * sum(lengths[:i]) for i in range(len(lengths))]
    borders = [0]
    for document in documents:
        borders.append(borders[-1] + len(sequences_of(document)))
    with (folder / "text.idx").open("wb") as file:
        file.write(
            b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(lengths), len(borders))
        )
        file.write(np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes())
        file.write(np.array(borders, "<i8").tobytes())
    return folder / "text.idx"


def write_llm_c(folder, ids=IDS, name="train_000.bin", magic=20240520, version=1, dtype="<u2"):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    (folder / name).write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())
    return folder / name


def write_nanogpt(folder, ids=IDS, name="train.bin", dtype="<u2"):
    (folder / name).write_bytes(np.array(ids, dtype).tobytes())
    return folder / name


def write_npy(folder, ids=IDS, name="a.npy", dtype="<u2"):
    np.save(folder / name, np.array(ids, dtype))
    return folder / name


WRITERS = {
    "megatron": write_megatron,
    "llm.c": write_llm_c,
    "nanogpt": write_nanogpt,
    "npy": write_npy,
}


def source_of(kind, path, **more):
    name = "nanogpt" if kind == "llm.c" else kind
    table = {} if kind == "megatron" else {name: {"eos_id": EOT}}
    table = {k: type(getattr(SourceConfig(), k))(**v) for k, v in table.items()}
    return open_source(SourceConfig(name=name, path=str(path), **{**table, **more}))


@pytest.mark.parametrize("kind", WRITERS)
def test_what_a_writer_wrote_is_read(tmp_path, kind):
    source = source_of(kind, WRITERS[kind](tmp_path))
    assert source.read(0, source.num_tokens).tolist() == IDS
    assert source.read(3, 8).tolist() == IDS[3:8]
    assert source.documents.tolist() == STARTS
    assert (source.num_tokens, source.num_documents, source.max_token_id) == (15, 4, 300)
    assert len(source.read(4, 4)) == 0
    json.dumps(source.fingerprint())
    with rejects("range", (0, 16), "range"):
        source.read(0, 16)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_are_those_of_a_token_file(tmp_path, kind, num_workers):
    class Plain:
        documents, num_tokens = np.array(STARTS), len(IDS)

        def read(self, start, stop):
            return np.array(IDS)[start:stop]

        def fingerprint(self):
            return {}

    stream = PackedStream(source_of(kind, WRITERS[kind](tmp_path)), 4, seed=1)
    loader, plain = (
        Loader(stream, 2, num_workers=num_workers),
        Loader(PackedStream(Plain(), 4, seed=1), 2),
    )
    for _ in range(5):
        got, wanted = next(loader), next(plain)
        for name in ("tokens", "labels", "positions", "document_ids"):
            assert getattr(got, name).tolist() == getattr(wanted, name).tolist()
    loader.close()


def test_a_pickled_source_maps_its_files_again(tmp_path):
    ids = [*range(50_000)] * 4
    source = source_of("nanogpt", write_nanogpt(tmp_path, ids))
    source.fingerprint()
    sent = pickle.dumps(source)
    assert len(sent) < 3000
    again = pickle.loads(sent)
    assert again.read(7, 9).tolist() == [7, 8]
    assert again.fingerprint() == source.fingerprint()


def test_F165_shards_may_be_more_than_the_limit_of_open_files(tmp_path):
    """Three times as many shards as there is room for descriptors, read in any order, twice."""
    opened = max(map(int, os.listdir("/proc/self/fd")))
    room = max(100, opened // 5)  # maps of each source take a 16th of the limit
    ids = np.arange(15 * room)
    for number in range(3 * room):
        write_nanogpt(tmp_path, ids[5 * number : 5 * number + 5], f"web_{number:04d}.bin")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + room, before[1]))
    try:
        source = source_of("nanogpt", tmp_path)
        for again in (source, pickle.loads(pickle.dumps(source))):
            for start in np.random.default_rng(0).permutation(len(ids) - 10).tolist():
                assert again.read(start, start + 8).tolist() == list(range(start, start + 8))
        assert source.read(0, len(ids)).tolist() == ids.tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_many_shards_are_one_source_in_sorted_order(tmp_path):
    """Also where a document goes on in the next file."""
    for i, part in enumerate([IDS[:3], IDS[3:7], IDS[7:]]):
        write_llm_c(tmp_path, part, f"web_train_{i:03}.bin")
    write_llm_c(tmp_path, [1, 2, EOT], "web_val_000.bin")
    source = source_of("nanogpt", tmp_path)
    assert source.read(0, 15).tolist() == IDS
    assert source.read(2, 8).tolist() == IDS[2:8]
    assert source.documents.tolist() == STARTS
    held_out = source_of("nanogpt", tmp_path, split="validation")
    assert held_out.read(0, 3).tolist() == [1, 2, EOT]


def test_an_id_may_begin_documents(tmp_path):
    write_llm_c(tmp_path, [EOT, 1, 2, EOT, 3])
    border = type(SourceConfig().nanogpt)(bos_id=EOT)
    source = open_source(SourceConfig(name="nanogpt", path=str(tmp_path), nanogpt=border))
    assert source.documents.tolist() == [0, 3]


def test_llama_3_shards_have_ids_of_32_bits(tmp_path):
    path = write_llm_c(tmp_path, [128_000, 5, EOT], magic=20240801, version=7, dtype="<u4")
    assert source_of("llm.c", path).read(0, 3).tolist() == [128_000, 5, EOT]


def test_sequences_of_megatron_are_concatenated_to_documents_and_empty_ones_left_out(tmp_path):
    documents = [DOCUMENTS[0], [], *DOCUMENTS[1:], []]
    write_megatron(tmp_path, documents, "int32", lambda d: [d[:2], d[2:]])
    for path in (tmp_path / "text", tmp_path / "text.bin", tmp_path):
        source = source_of("megatron", path)
        assert source.documents.tolist() == STARTS
        assert source.read(0, 15).tolist() == IDS


@pytest.mark.parametrize("at_once", [1, 2])
def test_F197_sequences_of_an_index_are_counted_in_all_parts(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(raw_formats, "_SEQUENCES_AT_ONCE", at_once)
    write_megatron(tmp_path)
    source = source_of("megatron", tmp_path)
    assert (source.documents.tolist(), source.read(0, 15).tolist()) == (STARTS, IDS)


def test_a_folder_of_megatron_sets_is_one_source(tmp_path):
    for name in ("b", "a"):
        write_megatron(tmp_path)
        for suffix in (".bin", ".idx"):
            (tmp_path / f"text{suffix}").rename(tmp_path / f"{name}{suffix}")
    source = source_of("megatron", tmp_path)
    assert source.documents.tolist() == [*STARTS, *(s + 15 for s in STARTS)]
    assert source.read(10, 20).tolist() == (IDS * 2)[10:20]


# ---- damage


def megatron(change):
    def make(folder):
        index = write_megatron(folder)
        index.write_bytes(change(bytearray(index.read_bytes())))
        return index

    return make


def shard(change, writer=write_llm_c, **more):
    def make(folder):
        path = writer(folder, **more)
        path.write_bytes(change(bytearray(path.read_bytes())))
        return path

    return make


def put(form, at, *values):
    def change(content):
        struct.pack_into("<" + form, content, at, *values)
        return content

    return change


def npy_of(array, **options):
    def make(folder):
        np.save(folder / "a.npy", array, **options)
        return folder / "a.npy"

    return make


LENGTHS, POINTERS, BORDERS = 34, 34 + 16, 34 + 16 + 32  # of the index of four sequences
DAMAGE = {
    "megatron magic": ("megatron", megatron(put("B", 0, 0x4C)), ("", ..., "header")),
    "megatron version": ("megatron", megatron(put("Q", 9, 2)), ("", ..., "version")),
    "megatron floats": ("megatron", megatron(put("B", 17, 6)), ("", ..., "version")),
    "megatron type 200": ("megatron", megatron(put("B", 17, 200)), ("", ..., "version")),
    "megatron wider type": ("megatron", megatron(put("B", 17, 4)), ("", ..., "order")),
    "megatron huge count": ("megatron", megatron(put("Q", 18, 2**62)), ("", ..., "length")),
    "megatron no sequence": ("megatron", megatron(put("Q", 18, 0)), ("", ..., "length")),
    "megatron huge borders": ("megatron", megatron(put("Q", 26, 2**63)), ("", ..., "length")),
    "megatron modes": ("megatron", megatron(lambda b: b + bytes(4)), ("", ..., "modalities")),
    "megatron negative length": ("megatron", megatron(put("i", LENGTHS, -4)), ("", ..., "lengths")),
    "megatron long length": ("megatron", megatron(put("i", LENGTHS, 2**31 - 1)), ("", ..., "order")),
    "megatron last length": ("megatron", megatron(put("i", LENGTHS + 12, 9)), ("", 30, "length")),
    "megatron pointer outside": ("megatron", megatron(put("q", POINTERS + 8, 2**62)), ("", ..., "order")),
    "megatron pointer negative": ("megatron", megatron(put("q", POINTERS, -2)), ("", ..., "order")),
    "megatron pointers swapped": ("megatron", megatron(put("qq", POINTERS + 8, 12, 8)), ("", ..., "order")),
    "megatron borders fall": ("megatron", megatron(put("q", BORDERS + 8, 4)), ("", ..., "borders")),
    "megatron borders outside": ("megatron", megatron(put("q", BORDERS + 32, 9)), ("", ..., "borders")),
    "megatron borders negative": ("megatron", megatron(put("q", BORDERS + 8, -1)), ("", ..., "borders")),
    "megatron tokens gone": ("megatron", lambda f: (write_megatron(f), (f / "text.bin").unlink()) and f, ("", ..., "missing")),
    "llm.c magic": ("llm.c", shard(put("i", 0, 20240521)), ("magic", 20240521, "unknown")),
    "llm.c big-endian": ("llm.c", shard(lambda b: bytearray(np.frombuffer(b[:1024], "<i4").astype(">i4").tobytes()) + b[1024:]), ("magic", -1999096831, "unknown")),
    "llm.c version": ("llm.c", shard(put("i", 4, 3)), ("version", 3, "unsupported")),
    "llm.c count": ("llm.c", shard(put("i", 8, 16)), ("", 1054, "length")),
    "llm.c count negative": ("llm.c", shard(put("i", 8, -15)), ("", -15, "empty")),
    "llm.c count huge": ("llm.c", shard(put("i", 8, 2**31 - 1)), ("", 1054, "length")),
    "llm.c half a header": ("llm.c", shard(lambda b: b[:300]), ("", 300, "length")),
    "llm.c no ids": ("llm.c", shard(lambda b: b, ids=[]), ("", 0, "empty")),
    "nanogpt without its eos": ("nanogpt", shard(lambda b: b[:6], write_nanogpt), ("nanogpt.eos_id", 99, "unused")),
    "nanogpt mixed with llm.c": ("nanogpt", lambda f: (write_llm_c(f), write_nanogpt(f)) and f, ("path", ANY, "mixed")),
    "nothing there": ("nanogpt", lambda f: f / "no.bin", ("path", ANY, "not_found")),
    "another folder": ("npy", lambda f: write_nanogpt(f) and f, ("path", ANY, "not_found")),
    "npy of objects": ("npy", npy_of(np.array([{}, 3], object), allow_pickle=True), ("dtype", "|O", "unsupported")),
    "npy of floats": ("npy", npy_of(np.ones(4)), ("dtype", "<f8", "unsupported")),
    "npy big-endian": ("npy", npy_of(np.ones(4, ">u2")), ("dtype", ">u2", "unsupported")),
    "npy of 64 bits unsigned": ("npy", npy_of(np.ones(4, "<u8")), ("dtype", "<u8", "unsupported")),
    "npy in two dims": ("npy", npy_of(np.ones((2, 3), "<u2", order="F")), ("dtype", "<u2", "unsupported")),
    "npy of one number": ("npy", npy_of(np.array(5, "<u2")), ("dtype", "<u2", "unsupported")),
    "npy of fields": ("npy", npy_of(np.zeros(3, [("a", "<u2")])), ("dtype", "|V2", "unsupported")),
    "npy empty array": ("npy", npy_of(np.zeros(0, "<u2")), ("", 0, "empty")),
    "npy cut in its header": ("npy", shard(lambda b: b[:40], write_npy), ("", ..., "header")),
    "npy huge count": ("npy", shard(lambda b: b.replace(b"(15,), }         ", b"(9999999999999,),}"), write_npy), ("", 159, "length")),
    "npy negative count": ("npy", shard(lambda b: b.replace(b"(15,)", b"(-5,)"), write_npy), ("", -5, "empty")),
    "npy other version": ("npy", shard(put("B", 6, 9), write_npy), ("", ..., "header")),
    "npy negative ids": ("npy", shard(lambda b: b, write_npy, ids=[3, -7, EOT], dtype="<i4"), ("id", -7, "negative")),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_F93_damage_is_one_line_before_a_row_is_read(tmp_path, damage):
    kind, make, problem = DAMAGE[damage]
    path = make(tmp_path)
    with rejects(*problem, InvalidData, where=tmp_path) as error:
        look_through(source_of(kind, path))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 450 + len(str(tmp_path))


def look_through(source):
    """What a run does before it starts, and then a batch."""
    assert source.max_token_id < 1000
    assert source.num_documents
    return source.read(0, source.num_tokens)


SLOW = [pytest.mark.slow, pytest.mark.lane("ci")]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=SLOW if at else []) for at, kind in enumerate(WRITERS)]
)
def test_any_flipped_byte_of_a_header_is_found_or_harmless(tmp_path, kind):
    """No crash, no allocation by a count, and no id that was not looked at before."""
    path = WRITERS[kind](tmp_path)
    content = path.read_bytes()
    for at in range(0, min(len(content), 1100), 1 if kind != "llm.c" else 7):
        for bit in (1, 128):
            changed = bytearray(content)
            changed[at] ^= bit
            path.write_bytes(changed)
            with contextlib.suppress(InvalidData):
                source = source_of(kind, path)
                ids = source.read(0, source.num_tokens)
                assert len(ids) <= 1024
                assert 0 <= ids.min() <= ids.max() <= source.max_token_id
                assert (np.diff(source.documents) > 0).all()


@pytest.mark.parametrize("kind", WRITERS)
def test_ids_that_grow_after_the_scan_are_rejected(tmp_path, kind):
    path = WRITERS[kind](tmp_path)
    source = source_of(kind, path)
    assert source.max_token_id == 300
    tokens = path.with_suffix(".bin") if kind == "megatron" else path
    content = bytearray(tokens.read_bytes())
    struct.pack_into("<H", content, len(content) - 6, 60_000)
    with tokens.open("r+b") as file:
        file.write(content)
    for _ in range(2):
        with rejects("", (1, 60000), "changed", InvalidData, where=tokens.name):
            source.read(0, 15)
    assert source.read(0, 5).tolist() == IDS[:5]


def test_a_job_that_opens_a_source_often_looks_through_it_once(tmp_path, monkeypatch):
    looked = []
    real = raw.np.flatnonzero
    monkeypatch.setattr(raw.np, "flatnonzero", lambda a: looked.append(1) or real(a))
    path = write_nanogpt(tmp_path)
    for _ in range(3):
        source_of("nanogpt", path).fingerprint()
    assert len(looked) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"name": "megatron"}, ("path", None, "missing")),
        ({"name": "npy", "path": "x", "dtype": "uint8"}, ("dtype", "uint8", "excludes")),
        ({"name": "nanogpt", "path": "x", "verify": "full"}, ("verify", "full", "excludes")),
        (
            {"name": "npy", "path": "x", "nanogpt": {"eos_id": 3}},
            ("nanogpt.eos_id", 3, "foreign"),
        ),
        ({"name": "npy", "path": "x", "npy": {"eos_id": -1}}, ("eos_id", -1, "range")),
        ({"name": "npy", "path": "x", "npy": {"eos_id": 1, "bos_id": 1}}, ("eos_id", 1, "excludes")),
        ({"name": "npy", "path": "x", "options": {"a": 1}}, ("options", {'a': 1}, "excludes")),
    ],
)  # fmt: skip
def test_keys_of_another_kind_are_rejected(arguments, problem):
    border = type(SourceConfig().npy)
    with rejects(*problem):
        TrainingSourceConfig(
            **{k: border(**v) if k in ("npy", "nanogpt") else v for k, v in arguments.items()}
        )


def test_a_dtype_that_a_header_contradicts_is_rejected(tmp_path):
    with rejects("dtype", "uint32", "mismatch"):
        source_of("llm.c", write_llm_c(tmp_path), dtype="uint32")
    wide = source_of(
        "nanogpt", write_nanogpt(tmp_path, dtype="<u4", name="wide.bin"), dtype="uint32"
    )
    assert wide.read(0, 15).tolist() == IDS


def test_a_split_needs_files_of_its_own(tmp_path):
    path = write_nanogpt(tmp_path)
    for place in (path, tmp_path):
        with rejects("path", str(place), "no_validation", InvalidData):
            source_of("nanogpt", place, split="validation")
    write_nanogpt(tmp_path, [4, EOT], "val.bin")
    assert source_of("nanogpt", tmp_path, split="validation").num_tokens == 2
    assert source_of("nanogpt", tmp_path).num_tokens == 15


@pytest.mark.parametrize(
    ("names", "trained", "held_out"),
    [
        ("fineweb_train_000001 fineweb_val_000000", "fineweb_train_000001", "fineweb_val_000000"),
        ("train val test", "train", "val"),
        ("web_0 web_test_0 web_dev web-Val", "web_0", "web-Val"),
        ("latest develop contest_1 tested", "contest_1 develop latest tested", ""),
        ("train test", "train", ""),
        (
            "retrieval interval_1 evaluation medieval",
            "evaluation interval_1 medieval retrieval",
            "",
        ),
        ("a b-valid Val0", "a", "Val0 b-valid"),
        ("constrained x val", "constrained x", "val"),
        ("train.0 validation.0", "train.0", "validation.0"),
    ],
)
def test_F150_a_split_is_a_word_of_a_name(tmp_path, names, trained, held_out):
    """Files are not left out for letters in the middle of their names."""
    for name in names.split():
        write_nanogpt(tmp_path, name=f"{name}.bin")
    found = raw.find_shards(tmp_path, "train", ".bin", "nanogpt")
    assert " ".join(file.stem for file in found) == trained
    if held_out:
        found = raw.find_shards(tmp_path, "validation", ".bin", "nanogpt")
        assert " ".join(file.stem for file in found) == held_out


def test_F150_test_shards_are_not_trained_on_and_are_reported(tmp_path, caplog):
    write_nanogpt(tmp_path, name="web_test.bin")
    with rejects("path", str(tmp_path), "no_train", InvalidData):
        source_of("nanogpt", tmp_path)
    assert source_of("nanogpt", tmp_path / "web_test.bin").num_tokens == 15  # by its name
    write_nanogpt(tmp_path, name="web_0.bin")
    with caplog.at_level("WARNING", "forge_data"):
        assert source_of("nanogpt", tmp_path).num_tokens == 15
        source_of("nanogpt", tmp_path)  # once
    (line,) = caplog.messages
    assert "web_test.bin" in line

"""Formats x compressions x damages: what is read is what was written, or there is one problem with key and code.

References are the standard library, numpy and pyarrow on the same bytes, and rules: a packed file that ends early is an error.
The quick lane takes cells in which each pair of format, compression, damage and place occurs.
"""

import contextlib
import csv
import functools
import io
import json
import random
import re
import struct
import tempfile
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from forge_data import InvalidData, SourceConfig, TokenFiles, open_source
from forge_data.chat.messages import find_conversations, read_records
from forge_data.io.datasets_library import load_set
from forge_data.prepare import prepare
from forge_data.prepare.read import find_inputs, read_documents
from forge_testing import damages
from forge_testing.damages import BYTES, ENCODINGS, FILES, PACKERS, as_user, covering, write_damaged
from forge_testing.problems import assert_problem

DRAW = random.Random(7)
TEXTS = [f"text {i} é {DRAW.randbytes(DRAW.randrange(1, 60)).hex()}, said" for i in range(60)]
IDS = [DRAW.randrange(1, 60_000) for _ in range(2000)]
MORE, MORE_IDS = ["one more", "and another"], [7, 8, 9]  # of a sound file of the same folder
END_OF_ARROW = b"\xff\xff\xff\xff\0\0\0\0"


# ---- sound files


def talk(text):
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]


def table(texts):
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows([("n", "text"), *enumerate(texts)])
    return file.getvalue()


def json_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


CONTENT = {
    "text": lambda texts: "".join(f"{text}\n" for text in texts),
    "jsonl": lambda texts: json_lines({"text": text} for text in texts),
    "csv": table,
    "chat": lambda texts: json_lines({"messages": talk(text)} for text in texts),
}


def parquet(columns):
    arrow, file = pytest.importorskip("pyarrow"), io.BytesIO()
    options = {"row_group_size": 20, "write_page_checksum": True}
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), file, **options)
    return file.getvalue()


@functools.cache
def saved_set():
    """The files of a set that `datasets` saved, its rows in batches of 20."""
    datasets, arrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        rows = datasets.Dataset.from_dict({"text": TEXTS, "messages": [*map(talk, TEXTS)]})
        rows.save_to_disk(folder)
        (path,) = Path(folder).glob("*.arrow")
        whole = arrow.ipc.open_stream(path.read_bytes()).read_all()
        with arrow.ipc.new_stream(path, whole.schema) as file:
            file.write_table(whole.combine_chunks(), max_chunksize=20)
        return {each.name: each.read_bytes() for each in Path(folder).iterdir()}


@functools.cache
def prepared():
    """The files of a folder of tokens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.txt"
        path.write_text(CONTENT["text"](TEXTS))
        prepare(path, path.with_name("out"), document="line")
        return {each.name: each.read_bytes() for each in path.with_name("out").iterdir()}


def npy(ids):
    file = io.BytesIO()
    np.save(file, np.array(ids, "<u2"))
    return file.getvalue()


def raw(ids):
    return np.array(ids, "<u2").tobytes()


def llm_c(ids):
    return struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253) + raw(ids)


def index(ids):
    """Megatron's, of a sequence of each id."""
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(ids), len(ids) + 1)
    numbers = np.arange(len(ids) + 1, dtype="<i8")
    return head + np.ones(len(ids), "<i4").tobytes() + (2 * numbers[:-1]).tobytes() + numbers.tobytes()  # fmt: skip


@functools.cache
def files_of(format, stem):
    """name -> bytes of one sound piece of data, of all texts where its stem is "a"."""
    texts, ids = (TEXTS, IDS) if stem == "a" else (MORE, MORE_IDS)
    if format in CONTENT:
        return {stem + ENDINGS[format]: CONTENT[format](texts).encode()}
    if "parquet" in format:
        columns = {"messages": [*map(talk, texts)]} if "chat" in format else {"text": texts}
        return {f"{stem}.parquet": parquet(columns)}
    if "set" in format:
        return saved_set()
    if "prepared" in format:
        return prepared()
    if "megatron" in format:
        return {f"{stem}.bin": raw(ids), f"{stem}.idx": index(ids)}
    return {stem + ENDINGS[format]: {"npy": npy, "llm.c": llm_c}.get(format, raw)(ids)}


ENDINGS = {"text": ".txt", "jsonl": ".jsonl", "csv": ".csv", "chat": ".jsonl", "npy": ".npy"}
ENDINGS |= {"nanogpt": ".bin", "llm.c": ".bin", "raw": ".bin"}
#: Of formats of several files, the one that is damaged.
HIT = {"set": "data-00000-of-00001.arrow", "chat set": "data-00000-of-00001.arrow"}
HIT |= {f"prepared {name}": name for name in ("tokens.bin", "documents.bin", "blocks.bin", "tokens.json")}  # fmt: skip
HIT |= {"megatron.bin": "a.bin", "megatron.idx": "a.idx"}
TABLES = ("parquet", "chat parquet")
ID_FILES = ("npy", "nanogpt", "llm.c", "raw", "megatron.bin", "megatron.idx")
ALONE = ("set", "chat set", "raw", *(f for f in HIT if "prepared" in f))  # read by one path


def read(format, path):
    """The texts, or the ids, of a path."""
    if "chat" in format:
        records = read_records(find_conversations(path, "train"))
        return [record.content["messages"][1]["content"] for record in records]
    if format == "set":
        return [row["text"] for row in load_set(SourceConfig("huggingface", str(path)))]
    if format in CONTENT or format in TABLES:
        pieces = (read_documents(p, "line", "text", lambda done: None) for p in find_inputs([path]))
        return [piece.text for each in pieces for piece in each]
    if format == "raw" or "prepared" in format:
        source = TokenFiles(path, "uint16" if format == "raw" else None)
        ids = source.read(0, source.num_tokens)
        starts = [*source.documents.tolist(), source.num_tokens]
        if format == "raw":
            return ids.tolist()
        return [bytes(ids[a : b - 1].tolist()).decode() for a, b in pairwise(starts)]
    name = {"llm.c": "nanogpt"}.get(format, format.partition(".")[0])
    source = open_source(SourceConfig(name, str(path)))
    return source.read(0, source.num_tokens).tolist()


# ---- cells


FORMATS = dict.fromkeys((*CONTENT, *TABLES, "set", "chat set", *ID_FILES, *HIT))


def makes_sense(cell):
    """Only text is packed and encoded; in a folder, a file whose name says nothing of its format is left out."""
    if cell.format not in CONTENT and (cell.compression or cell.damage in ENCODINGS):
        return False
    if cell.damage == "wrong ending" and cell.format in ID_FILES and cell.place == "folder":
        return False
    single = cell.format in HIT or cell.format == "raw"
    if (single and cell.damage == "folder") or (
        cell.format in HIT and cell.damage == "wrong ending"
    ):
        return False
    return not (cell.format in ALONE and cell.place == "folder")


GRID = product(FORMATS, PACKERS, (*ENCODINGS, *BYTES, *FILES), ("given", "folder"))
CELLS = [cell for each in GRID if makes_sense(cell := damages.FileCell(*each))]


COVERING = covering(CELLS)


def write(cell, folder):
    """Write the files of a cell. Returns the path to read, and the bytes of the damaged file."""
    (name, content), *others = sorted(
        files_of(cell.format, "a").items(), key=lambda each: each[0] != HIT.get(cell.format)
    )
    for other, whole in others:
        (folder / other).write_bytes(whole)
    if cell.place == "folder":
        for other, whole in files_of(cell.format, "z").items():
            whole = PACKERS[cell.compression](whole)
            (folder / f"{other}.{cell.compression}".rstrip(".")).write_bytes(whole)
    content = ENCODINGS.get(cell.damage, bytes)(content)
    content = BYTES.get(cell.damage, bytes)(PACKERS[cell.compression](content))
    path = folder / f"{name}.{cell.compression}".rstrip(".")
    if cell.damage == "wrong ending":
        other = ".bin" if cell.format == "npy" else f"{path.suffix}.gz"
        path = path.with_suffix("" if cell.compression else ".jsonl" if cell.format in TABLES else other)  # fmt: skip

    write_damaged(path, content, cell.damage)
    if cell.damage == "folder":  # as Spark writes
        (path / path.name).write_bytes(content)
    whole = cell.place == "folder" or cell.format in ("set", "chat set") or "prepared" in cell.format  # fmt: skip
    return folder if whole else folder / "a.idx" if "megatron" in cell.format else path, content


# ---- what is wanted


#: Problems of formats, where a file is not of its format, and of damages.
SPOILT = {
    "text": {("", "encoding"), ("", "utf16")},
    "csv": {("", "encoding"), ("", "utf16"), ("", "not_csv"), ("", "columns"), ("text_field", "missing")},
    "jsonl": {("", "encoding"), ("", "utf16"), ("", "not_json"), ("", "type"), ("text", "missing")},
    "chat": {("", "encoding"), ("", "not_json")},
    "parquet": {("", "damaged")},
    "set": {("path", "not_loaded"), ("", "truncated")},
    "npy": {("", "header"), ("", "length")},
    "ids": {("", "length"), ("magic", "unknown")},
    "megatron.idx": {("", code) for code in ("header", "version", "length", "order", "borders")},
    "prepared": {("", "length"), ("block", "damaged"), ("", "order"), ("sha256", "mismatch")},
    "prepared tokens.json": {("", "not_json"), ("version", "version")},
    "packed": {("", "truncated"), ("", "damaged")},
    "wrong ending": {("", "damaged"), ("", "ending"), ("", "encoding"), ("path", "packed"), ("", "header")},
    "fifo": {("inputs", "not_found"), ("path", "no_files"), ("path", "not_found"), ("path", "not_a_file"),
             ("", "not_a_file"), ("", "missing")},
    "dead link": {("inputs", "not_found"), ("path", "not_found"), ("", "not_found"), ("", "not_a_file"),
                  ("", "missing"), ("", "lost"), ("path", "not_loaded")},
    "rights": {(PermissionError,), ("path", "not_loaded")},
}  # fmt: skip


def parsed(format, content):
    """What a file of text holds, by the standard library; None where it is not of its format."""
    nulls = content[:4096].count(0)
    if nulls > 1 and nulls * 20 > len(content[:4096]):
        return None
    try:
        text = content.decode("utf-8-sig")
        if format == "text":
            return [line for line in re.split("\r\n|\r|\n", text) if line.strip()]
        if format == "csv":
            header, *rows = csv.reader(io.StringIO(text, newline=""), strict=True)
            assert "text" in header
            return [dict(zip(header, row, strict=True))["text"] for row in rows]
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        return [r["text"] if format == "jsonl" else r["messages"][1]["content"] for r in rows]
    except (ValueError, KeyError, AssertionError, csv.Error):  # UnicodeDecodeError is a ValueError
        return None


def ids_of(format, content):
    """The ids in a file of this content, of which the tokens of a .bin are all; None where its size is wrong."""
    try:
        if format == "npy":
            found = np.load(io.BytesIO(content))
            return found.tolist() if content == npy(found) else None
        if format == "llm.c":
            head = struct.unpack("<3i", content[:12])
            content = content[1024:] if head == (20240520, 1, (len(content) - 1024) / 2) else b""
        if format == "megatron.bin" and len(content) != 2 * len(IDS):
            return None
        return np.frombuffer(content, "<u2").tolist() or None
    except (ValueError, struct.error, EOFError):
        return None


def rows_of(format, content):
    """The texts of an Arrow stream that ends as one."""
    arrow = pytest.importorskip("pyarrow")
    try:
        rows = arrow.ipc.open_stream(content).read_all().to_pylist()
    except (arrow.ArrowException, OSError):
        return None
    if not content.endswith(END_OF_ARROW) or len(content) > len(saved_set()[HIT["set"]]):
        return None
    return [row["text"] if format == "set" else row["messages"][1]["content"] for row in rows]


def wanted(cell, content):
    """(what may be read or None, the problems that may be raised instead); `content` is that of the damaged file."""
    format, damage = cell.format, cell.damage
    own = IDS if format in ID_FILES else TEXTS
    harmless = (
        damage == "none" or "flipped" in damage
    )  # where a checksum finds each flip that changes what is read
    if damage == "folder" and format in ID_FILES and cell.place == "folder":
        return None, {("", "not_a_file")}  # folders below it are not searched
    if damage in FILES:
        return own if damage == "folder" else None, SPOILT.get(damage, set())
    if cell.compression and (damage in BYTES and damage not in ("none", "two in one")):
        padded = damage == "zeros" and cell.compression in ("gz", "xz")
        return own if padded or harmless else None, set() if padded else SPOILT["packed"]
    if format in CONTENT:
        text = ENCODINGS.get(damage, bytes)(CONTENT[format](TEXTS).encode()) * (
            1 + (damage == "two in one")
        )
        found, problems = parsed(format, text if cell.compression else content), SPOILT[format]
    elif "set" in format:
        found, problems = rows_of(format, content), SPOILT["set"]
    elif "parquet" in format:
        found, problems = own if harmless else None, SPOILT["parquet"]
    elif "prepared" in format:
        found = own if damage == "none" or ".json" in format else None
        problems = SPOILT["prepared"] | SPOILT.get(format, set())
    elif format == "megatron.idx":
        found, problems = own if damage == "none" else None, SPOILT[format]
    else:
        found, problems = ids_of(format, content), SPOILT.get(format, SPOILT["ids"])
    sure = damage == "none" or (found is not None and (format in CONTENT or format in ID_FILES))
    return found, set() if sure else problems


def fault(cell):
    """What is wrong with a cell; None if nothing is."""
    with tempfile.TemporaryDirectory(
        dir="/tmp"
    ) as folder:  # pytest's own are not open to other users
        Path(folder).chmod(0o755)
        path, content = write(cell, Path(folder))
        read_as = (
            "nanogpt" if cell.format == "npy" and cell.damage == "wrong ending" else cell.format
        )
        found, problems = wanted(cell, content)
        if cell.place == "folder" and found is not None:
            found = found + (MORE_IDS if cell.format in ID_FILES else MORE)
        try:
            with as_user() if cell.damage == "rights" else contextlib.nullcontext():
                got = read(read_as, path)
        except PermissionError as error:
            return (
                None if (PermissionError,) in problems and folder in str(error) else (cell, error)
            )
        except InvalidData as error:
            key, code = error.problems[0].key, error.problems[0].code
            assert_problem(error, key, code=code)  # on record
            sound = (key, code) in problems and folder in str(error) and "\n" not in str(error)
            return None if sound else (cell, error)
        return None if got == found else (cell, f"{len(got)} were read")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cells", ["covering", pytest.param("all", marks=pytest.mark.slow)])
def test_damaged_data_is_read_as_written_or_is_one_problem(format, cells):
    chosen = [c for c in CELLS if c.format == format and (cells == "all" or c in COVERING)]
    assert [found for cell in chosen if (found := fault(cell))] == []

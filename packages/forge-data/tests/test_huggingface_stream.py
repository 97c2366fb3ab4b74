"""Sets of the datasets library, read while training: every format, each document once, and what is broken."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from forge_data import (
    DataConfig,
    InvalidData,
    Loader,
    PhaseConfig,
    SourceConfig,
    TrainingSourceConfig,
    open_source,
    open_training,
)
from forge_data.kinds import HuggingFaceConfig
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

datasets = pytest.importorskip("datasets")

TEXTS = [f"document {i} " + "abc " * (i % 9) for i in range(60)]


def parquet(folder, texts=TEXTS, files=3, rows=7, column="text"):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir(exist_ok=True)
    for i in range(files):
        pq.write_table(pa.table({column: texts[i::files]}), folder / f"{i}.parquet", rows)
    return folder


def json_lines(folder, texts=TEXTS):
    folder.mkdir()
    for i in range(2):
        lines = [json.dumps({"text": text}) for text in texts[i::2]]
        (folder / f"{i}.jsonl").write_text("\n".join(lines))
    return folder


def saved(folder, texts=TEXTS):
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder, num_shards=3)
    return folder


def arrow(folder):
    (folder.parent / "saved").mkdir(parents=True)
    saved(folder.parent / "saved")
    folder.mkdir()
    for file in (folder.parent / "saved").glob("*.arrow"):
        file.rename(folder / file.name)
    return folder


def config(path, **options):
    options = {"virtual_shards": 4, "shuffle_window": 5, **options}
    return TrainingSourceConfig(
        "huggingface", str(path), huggingface=HuggingFaceConfig(streaming=True, **options)
    )


def stream_of(path, seed=0, **options):
    return open_training(DataConfig(16, sources={"web": config(path, **options)}), seed)


def documents(stream):
    """Every text of a set, through its pieces."""
    pieces = stream.pieces
    return [text for piece in range(len(pieces)) for text in pieces.texts(piece, 0)]


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("make", "pieces"), [(parquet, 9), (json_lines, 2), (saved, 3), (arrow, 3)]
)
def test_each_format_is_split_into_chunks_that_have_every_text_once(tmp_path, make, pieces):
    stream = stream_of(make(tmp_path / "set"))
    assert len(stream.pieces) == pieces
    assert stream.num_shards == min(4, pieces)
    assert Counter(documents(stream)) == Counter(TEXTS)
    for piece in range(pieces):
        whole = list(stream.pieces.texts(piece, 0))
        assert list(stream.pieces.texts(piece, 3)) == whole[3:]
    assert stream_of(tmp_path / "set").fingerprint() == stream.fingerprint()


@pytest.mark.lane("quick")
@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_where_it_was_stopped(tmp_path, workers):
    folder = parquet(tmp_path / "set")
    whole = stream_of(folder).arrays(np.arange(120))["tokens"].tolist()
    loader, got = Loader(stream_of(folder), 6, num_workers=workers), []
    got += [row for _ in range(9) for row in next(loader).tokens.tolist()]
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    resumed = Loader(stream_of(folder), 11, num_workers=2 - workers)
    resumed.load_state_dict(state)
    got += [row for _ in range(6) for row in next(resumed).tokens.tolist()]
    resumed.close()
    assert got == whole
    assert stream_of(folder, seed=1).arrays(np.arange(120))["tokens"].tolist() != whole


def test_a_mixture_with_a_set_that_is_streamed(tmp_path):
    web = config(parquet(tmp_path / "set"))
    sources = {"web": web, "manual": TrainingSourceConfig(weight=1.0)}
    with rejects("sources.web.weight", ..., "missing"):
        DataConfig(16, sources={"web": web, "manual": TrainingSourceConfig()})
    sources["web"] = TrainingSourceConfig(
        "huggingface", web.path, huggingface=web.huggingface, weight=3.0
    )
    mixture = open_training(DataConfig(16, sources=sources), 0)
    loader = Loader(mixture, 8)
    batches = [next(loader) for _ in range(4)]
    assert np.bincount(np.concatenate([b.source for b in batches])).tolist() == [24, 8]
    resumed = Loader(open_training(DataConfig(16, sources=sources), 0), 8)
    resumed.load_state_dict(loader.state_dict())
    assert next(resumed).tokens.tolist() == next(loader).tokens.tolist()


def refused(path, *problem, **options):
    """The text of the problem with a set."""
    with rejects(*problem, InvalidData) as error:
        open_source(config(path, **options))
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def test_a_missing_folder(tmp_path):
    refused(tmp_path / "nowhere", "path", str(tmp_path / "nowhere"), "not_found")


def test_an_empty_folder(tmp_path):
    assert "EmptyDatasetError" in refused(tmp_path, "path", str(tmp_path), "not_loaded")


@pytest.mark.parametrize(("make", "code"), [(parquet, "empty"), (saved, "no_rows")])
def test_an_empty_split(tmp_path, make, code):
    path = make(tmp_path / "set", texts=[])
    refused(path, "path", str(path), code)


def test_a_split_that_is_not_there(tmp_path):
    path = parquet(tmp_path / "set")
    assert ": test" in refused(path, "path", str(path), "not_loaded", split="test")


def test_no_column_of_text(tmp_path):
    message = refused(parquet(tmp_path / "set", column="content"), "text_field", "text", "missing")
    assert "set piece 0 of 9: " in message
    assert "content" in message
    stream_of(tmp_path / "set", text_field="content")


def test_a_column_that_is_no_text(tmp_path):
    path = parquet(tmp_path / "set", texts=list(range(60)))
    assert "int64" in refused(path, "text_field", "text", "type")


def test_a_row_without_text(tmp_path):
    folder = parquet(tmp_path / "set", texts=[*TEXTS[:40], None, *TEXTS[40:]], files=1)
    with rejects("text", None, "null", InvalidData, where="piece 5 of 9 row 5"):
        documents(stream_of(folder))


def test_a_file_without_a_footer(tmp_path):
    folder = parquet(tmp_path / "set")
    file = folder / "1.parquet"
    file.write_bytes(file.read_bytes()[:-40])
    refused(folder, "path", str(folder), "not_loaded")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_is_damaged_in_the_middle(tmp_path, workers):
    folder = parquet(tmp_path / "set", rows=20, files=1)
    file = folder / "0.parquet"
    pq = pytest.importorskip("pyarrow.parquet")
    column = pq.ParquetFile(file).metadata.row_group(1).column(0)
    first = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
    content = bytearray(file.read_bytes())
    content[first : first + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(bytes(content))
    loader = Loader(stream_of(folder), 4, num_workers=workers)
    with rejects("", ..., "damaged", InvalidData, where="set piece 1 of 3") as error:
        [next(loader) for _ in range(60)]
    assert len(str(error.value).splitlines()) == 1
    loader.close()


def test_a_change_in_the_middle_of_a_file_is_seen_and_of_a_large_set_its_ends(
    tmp_path, monkeypatch
):
    from forge_data.sources import huggingface

    file = json_lines(tmp_path / "set", [f"{i} " * 300 for i in range(400, 800)]) / "0.jsonl"
    found = []
    for whole in (1 << 30, 0):
        monkeypatch.setattr(huggingface, "_WHOLE", whole)
        before = stream_of(tmp_path / "set").fingerprint()
        content = bytearray(file.read_bytes())
        at = content.index(b" 6", len(content) // 2) + 1
        content[at] ^= 1  # 6 becomes 7
        file.write_bytes(content)
        after = stream_of(tmp_path / "set").fingerprint()
        found.append([key for key in before if before[key] != after[key]])
    assert found == [["source.file.0"], []]


def test_other_columns_of_parquet_are_not_read(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"n": list(range(60)), "text": TEXTS, "large": ["x" * 500] * 60})
    (tmp_path / "set").mkdir()
    pq.write_table(table, tmp_path / "set" / "0.parquet", 20)
    stream = stream_of(tmp_path / "set")
    assert Counter(documents(stream)) == Counter(TEXTS)
    assert {*next(stream.pieces._tables(0)).column_names} == {"text"}


@pytest.mark.lane("quick")
def test_changed_data_is_rejected_with_the_difference(tmp_path):
    folder = parquet(tmp_path / "set")
    loader = Loader(stream_of(folder), 4)
    next(loader)
    state = loader.state_dict()
    changed = {
        "source.file.1": lambda: parquet(folder, [*TEXTS[:7], "Document", *TEXTS[8:]]),
        "stream.pieces": lambda: parquet(folder, rows=5),
        "source.files": lambda: parquet(folder, files=4),
    }
    for key, change in changed.items():
        change()
        with rejects("fingerprint", code="mismatch", kind=InvalidData) as error:
            Loader(stream_of(folder), 4).load_state_dict(state)
        assert key in error.value.problems[0].value
    for file in folder.iterdir():
        file.unlink()
    Loader(stream_of(parquet(folder)), 4).load_state_dict(state)
    with rejects(
        "fingerprint", ["order.seed"], "mismatch", InvalidData, where="checkpoint 0, now 1"
    ):
        Loader(stream_of(folder, seed=1), 4).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"virtual_shards": 3}, ("virtual_shards", 3, "requires")),
        ({"streaming": True, "cache": "here"}, ("cache", "here", "excludes")),
        ({"streaming": True, "split": "train[:9]"}, ("split", "train[:9]", "slice")),
        (
            {"streaming": True, "shuffle_window": 0},
            ("shuffle_window", 0, "range"),
        ),
    ],
)
def test_keys_without_an_effect_are_rejected(options, problem):
    with rejects(*problem):
        HuggingFaceConfig(**options)


def test_options_that_need_a_number_of_rows_are_rejected():
    streamed = HuggingFaceConfig(streaming=True)
    limited = TrainingSourceConfig("huggingface", "a", huggingface=streamed, max_epochs=2)
    with rejects("sources.web.max_epochs", 2, "streaming"):
        DataConfig(sources={"web": limited})
    longer = {"long": PhaseConfig(100, seq_len=32)}
    with rejects("phases.long.seq_len", 32, "mismatch"):
        DataConfig(16, sources={"web": replace(limited, max_epochs=None)}, phases=longer)
    with rejects("verify", "off", "excludes"):
        SourceConfig("huggingface", "a", verify="off", huggingface=streamed)
    held_out = SourceConfig("huggingface", "a", huggingface=streamed)
    with rejects("validation", ..., "streaming"):
        DataConfig(sources={"web": TrainingSourceConfig()}, validation=held_out)

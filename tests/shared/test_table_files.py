"""Parquet files and saved sets of which the libraries would read fewer rows silently."""

import os

import pytest

from forge_data import InvalidData
from forge_data._shared.table_files import check_parquet, check_saved_set
from forge_testing.problems import rejects

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize(("first", "second"), [(1, 900), (900, 1), (50, 50)])
def test_two_parquet_files_in_one_are_rejected(tmp_path, first, second, index):
    whole = []
    for rows in (first, second):
        table = arrow.table({"text": [f"row {i}" for i in range(rows)], "n": range(rows)})
        path = tmp_path / f"{len(whole)}.parquet"
        parquet.write_table(table, path, write_page_index=index, row_group_size=300)
        whole.append(path.read_bytes())
        check_parquet(path, parquet.ParquetFile(path).metadata, InvalidData)
    path.write_bytes(b"".join(whole))
    with rejects("", ..., "damaged", InvalidData, where=path):
        check_parquet(path, parquet.ParquetFile(path).metadata, InvalidData)


def test_a_saved_set_is_one_complete_stream(tmp_path):
    table, path = arrow.table({"n": range(90)}), tmp_path / "train" / "a.arrow"
    path.parent.mkdir()
    with arrow.ipc.new_stream(path, table.schema) as file:
        file.write_table(table.slice(0, 60), max_chunksize=30)
        file.write_table(table.slice(60))
    sound = path.read_bytes()
    check_saved_set(tmp_path, InvalidData)

    ends = [at for at in range(0, len(sound), 8) if sound.startswith(b"\xff\xff\xff\xff", at)]
    assert len(ends) == 5  # the schema, three batches and the end
    for content in (*(sound[:end] for end in ends[1:]), b"", sound + bytes(8), sound * 2):
        path.write_bytes(content)
        with rejects("", ..., "truncated", InvalidData, where=path):
            check_saved_set(tmp_path, InvalidData)
    path.unlink()
    os.mkfifo(path)
    with rejects("", ..., "not_a_file", InvalidData, where=path):
        check_saved_set(tmp_path, InvalidData)
    path.rename(path.with_name("cache-a.arrow"))  # of the library, which does not read it
    check_saved_set(tmp_path, InvalidData)

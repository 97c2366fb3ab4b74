"""Rows per second of 2,048 tokens in random order, beside other readers of the same file, as one JSON line.

What a row is: `raw_gather` and `torch_dataloader` int64 tokens and labels over borders of documents (one array of
16 kB and a view), `datasets_*` tokens only (uint16 in numpy), `numpy_with_documents` and `forge*` int64 tokens, labels that
stop at borders, positions and document ids (64 kB); `forge*` is checked and counted too, and a resume continues it.
`litdata` (with --litdata PYTHON, of an environment that has it) gives int64 tokens and labels of 64 MB chunks of its own.

Rounds alternate between the sides; figures are medians of wall time, and without workers of processor time too, which
holds on a busy machine. Writes and removes a file of 2 GB, and as much for litdata.
Usage: python packages/forge-data/benchmarks/data.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forge_data import (
    DataConfig,
    Loader,
    PackedStream,
    SourceConfig,
    TokenFiles,
    TrainingSourceConfig,
    open_stream,
    open_training,
)
from forge_data.packing_config import PackingConfig
from forge_data.prepare.token_writer import TokenWriter

VOCAB = 50_000

#: Reads a number of batches; wall and processor seconds.
Timed = Callable[[int], tuple[float, float]]


def write_tokens(folder: Path, num_tokens: int) -> None:
    """Token files of documents with log-normal lengths, of which a fifth are longer than 2,048 tokens."""
    rng = np.random.default_rng(0)
    writer = TokenWriter(folder, VOCAB, None)
    while writer.num_tokens < num_tokens:
        length = max(1, int(np.exp(rng.normal(np.log(2048) - 0.8416, 1.0))))
        writer.add(rng.integers(0, VOCAB, length), last=True)
    writer.finish()


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What a training script of one page does: a map, and rows of it."""

    def __init__(self, path: Path, seq_len: int) -> None:
        self.path, self.seq_len = path, seq_len
        self.tokens = np.memmap(path, np.uint16, mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = row * self.seq_len
        ids = torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))
        return ids[:-1], ids[1:]


def raw_gather(path: Path, seq_len: int, batch: int) -> Iterator[Any]:
    """The floor: slices of the map, copied into one array; no borders of documents, no positions."""
    tokens = np.asarray(np.memmap(path, np.uint16, mode="r"))
    order = np.random.default_rng(0).permutation((len(tokens) - 1) // seq_len)
    for first in range(0, len(order) - batch, batch):
        ids = np.empty((batch, seq_len + 1), np.int64)
        for i, row in enumerate(order[first : first + batch]):
            ids[i] = tokens[row * seq_len : row * seq_len + seq_len + 1]
        whole = torch.from_numpy(ids)
        yield whole[:, :-1], whole[:, 1:]


def gather_with_documents(folder: Path, seq_len: int, batch: int) -> Iterator[Any]:
    """The same four arrays as Forge, the obvious way in numpy: contiguous tokens and labels, positions and documents of
    each row; nothing is checked, and the order is stored."""
    tokens = np.asarray(np.memmap(folder / "tokens.bin", np.uint16, mode="r"))
    documents = np.asarray(np.memmap(folder / "documents.bin", np.int64, mode="r"))
    order = np.random.default_rng(0).permutation((len(tokens) - 1) // seq_len)
    for first in range(0, len(order) - batch, batch):
        found = [np.empty((batch, seq_len), np.int64) for _ in range(4)]
        for i, row in enumerate(order[first : first + batch]):
            start = row * seq_len
            ids = tokens[start : start + seq_len + 1]
            found[0][i], found[1][i] = ids[:-1], ids[1:]
            lo, hi = np.searchsorted(documents, [start + 1, start + seq_len + 1])
            borders = documents[lo:hi] - start  # each in 1..S
            found[1][i, borders - 1] = -100
            begins = np.concatenate([[0], borders[borders < seq_len]])
            lengths = np.diff(begins, append=seq_len)
            found[2][i] = np.arange(seq_len) - np.repeat(begins, lengths)
            found[3][i] = np.repeat(np.arange(len(begins)), lengths)
        yield [torch.from_numpy(value) for value in found]


def dataset_of(path: Path, seq_len: int, kind: str) -> Any:
    """`datasets` over the same bytes: fixed-size lists in an Arrow table, zero-copy from the map."""
    import pyarrow as pa
    from datasets import Dataset

    tokens = np.memmap(path, np.uint16, mode="r")
    rows = len(tokens) // seq_len
    flat = pa.Array.from_buffers(pa.uint16(), rows * seq_len, [None, pa.py_buffer(tokens.data)])
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, seq_len)})
    return Dataset(table).with_format(kind)


def of_datasets(path: Path, seq_len: int, batch: int, kind: str) -> Iterator[Any]:
    """Rows of a set in random order, a batch at a time."""
    found = dataset_of(path, seq_len, kind)
    order = np.random.default_rng(0).permutation(len(found))
    for first in range(0, len(order) - batch, batch):
        yield found[order[first : first + batch].tolist()]["tokens"]


def of_datasets_workers(path: Path, seq_len: int, batch: int) -> Iterator[Any]:
    """A set behind torch's `DataLoader` with two workers."""
    found = dataset_of(path, seq_len, "torch")
    return iter(torch.utils.data.DataLoader(found, batch, shuffle=True, num_workers=2))


def of_torch(rows: Rows, batch: int, workers: int) -> Iterator[Any]:
    """`DataLoader`, shuffled, with its own choice of prefetching."""
    loader = torch.utils.data.DataLoader(rows, batch, shuffle=True, num_workers=workers)
    return iter(loader)


def timed(batches: Iterator[Any]) -> Timed:
    """Reads batches here; the first ones, with what starts up, are left out."""
    list(islice(batches, 4))

    def read(count: int) -> tuple[float, float]:
        began, began_busy = time.perf_counter(), time.process_time()
        for _ in islice(batches, count):
            pass
        return time.perf_counter() - began, time.process_time() - began_busy

    return read


def _timed_side(make: Callable[[], Iterator[Any]]) -> Timed:
    return timed(make())


def of_litdata(
    python: str, path: Path, folder: Path, seq_len: int, batch: int, workers: int
) -> Timed:
    """litdata in a process of another environment, which times itself."""
    script = Path(__file__).with_name("litdata_side.py")
    sizes = map(str, (seq_len, batch, workers))
    child = subprocess.Popen(
        [python, str(script), str(path), str(folder), *sizes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    ready = child.stdout.readline()
    if not ready.startswith("ready"):
        raise RuntimeError(f"{python} {script} must have litdata, torch and numpy; install them")

    def read(count: int) -> tuple[float, float]:
        assert child.stdin is not None
        assert child.stdout is not None
        print(count, file=child.stdin, flush=True)
        wall, busy = map(float, child.stdout.readline().split())
        return wall, busy

    return read


def rates_of(
    sides: dict[str, Callable[[], Timed]], rounds: int, batches: int, batch: int
) -> dict[str, dict[str, float]]:
    """Rows/s of each side, medians over rounds that alternate between the sides."""
    readers = {name: make() for name, make in sides.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, read in readers.items():
            found[name].append(read(batches))
    return {
        name: {
            "rows_per_second": round(batches * batch / statistics.median(wall)),
            "rows_per_processor_second": round(batches * batch / statistics.median(busy)),
        }
        for name, (wall, busy) in ((n, tuple(zip(*times))) for n, times in found.items())
    }


def seek_milliseconds(stream: PackedStream) -> float:
    """Median time of the first row of a loader that continues at 10^12."""
    times = []
    for i in range(50):
        began = time.perf_counter()
        stream.instance(10**12 + i * len(stream))
        times.append(time.perf_counter() - began)
    return round(1000 * statistics.median(times), 3)


def peak_bytes(stream: PackedStream, instance: int) -> int:
    """Memory that a row takes at its most."""
    tracemalloc.start()
    stream.instance(instance)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--litdata", help="a Python whose environment has litdata")
    arguments = parser.parse_args()
    seq_len, batch = arguments.seq_len, arguments.batch
    with tempfile.TemporaryDirectory() as place:
        os.environ["FORGE_CACHE"] = f"{place}/cache"
        folder = Path(place) / "tokens"
        write_tokens(folder, int(arguments.gigabytes * 5e8))
        path = folder / "tokens.bin"
        source = SourceConfig("tokens", str(folder), verify="off")
        touched = SourceConfig("tokens", str(folder))
        began = time.process_time()
        packed = open_stream(source, seq_len, packing=PackingConfig("best_fit"))
        row: dict[str, object] = {"benchmark": "forge-data data", **vars(arguments)}
        row["plan_seconds"] = round(time.process_time() - began, 2)
        row["packing"] = packed.report()  # type: ignore[attr-defined]
        plain = PackedStream(TokenFiles(folder, verify="off"), seq_len)
        shares = {
            f"s{i}": TrainingSourceConfig("tokens", str(folder), verify="off", weight=1.0 + i)
            for i in range(5)
        }
        mixture = open_training(DataConfig(seq_len, sources=shares))
        rows = Rows(path, seq_len)
        sides: dict[str, Callable[[], Iterator[Any]]] = {
            "raw_gather": lambda: raw_gather(path, seq_len, batch),
            "numpy_with_documents": lambda: gather_with_documents(folder, seq_len, batch),
            "forge": lambda: Loader(plain, batch),
            "forge_verify_touch": lambda: Loader(open_stream(touched, seq_len), batch),
            "forge_best_fit": lambda: Loader(packed, batch),
            "forge_mixture_of_5": lambda: Loader(mixture, batch),
            "torch_dataloader": lambda: of_torch(rows, batch, 0),
            "datasets_torch": lambda: of_datasets(path, seq_len, batch, "torch"),
            "datasets_numpy": lambda: of_datasets(path, seq_len, batch, "numpy"),
        }
        two: dict[str, Callable[[], Iterator[Any]]] = {
            "forge": lambda: Loader(plain, batch, num_workers=2),
            "forge_best_fit": lambda: Loader(packed, batch, num_workers=2),
            "torch_dataloader": lambda: of_torch(rows, batch, 2),
            "datasets_torch": lambda: of_datasets_workers(path, seq_len, batch),
        }
        for workers, here in ((0, sides), (2, two)):
            timers = {name: partial(_timed_side, make) for name, make in here.items()}
            if arguments.litdata:
                chunks = Path(place) / "litdata"
                timers["litdata"] = partial(
                    of_litdata, arguments.litdata, path, chunks, seq_len, batch, workers
                )
            row[f"workers_{workers}"] = rates_of(timers, arguments.rounds, arguments.batches, batch)
        row["seek_milliseconds_at_1e12"] = seek_milliseconds(plain)
        row["seek_milliseconds_at_1e12_packed"] = seek_milliseconds(packed)  # type: ignore[arg-type]
        row["peak_bytes_at_1e6"] = peak_bytes(plain, 10**6)
        row["peak_bytes_at_1e12"] = peak_bytes(plain, 10**12)
    row["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    row.update(torch=torch.__version__, python=platform.python_version(), load=os.getloadavg()[0])
    print(json.dumps(row))


if __name__ == "__main__":
    main()

"""Tokens per second of the loader and the time of a seek, as one JSON line.

Usage: python packages/forge-data/benchmarks/loader.py [--seq_len 2048] [--global_batch 16]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import numpy as np
import torch

from forge_data import BuiltinCorpus, Loader, PackedStream, Permutation


def tokens_per_second(stream: PackedStream, global_batch: int, workers: int, steps: int) -> float:
    """Of one loader after its first batch, start of the workers left out."""
    loader = Loader(stream, global_batch, num_workers=workers)
    next(loader)
    start = time.perf_counter()
    for _ in range(steps):
        next(loader)
    seconds = time.perf_counter() - start
    loader.close()
    return steps * global_batch * stream.seq_len / seconds


def seek_seconds(n: int, repeats: int) -> float:
    """Median time to make the permutation of a new epoch and ask it for one position."""
    times = []
    for epoch in range(repeats):
        start = time.perf_counter()
        Permutation(n, seed=0, epoch=epoch)(np.array([n // 3]))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument("--global_batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    stream = PackedStream(BuiltinCorpus(), arguments.seq_len)
    row: dict[str, object] = {"benchmark": "forge-data loader", **vars(arguments)}
    for workers in (0, 2):
        rates = [
            tokens_per_second(stream, arguments.global_batch, workers, arguments.steps)
            for _ in range(arguments.repeats)
        ]
        row[f"tokens_per_second_workers_{workers}"] = round(statistics.median(rates))
        row[f"spread_workers_{workers}"] = round(
            (max(rates) - min(rates)) / statistics.median(rates), 3
        )
    row["seek_seconds_at_1e12"] = round(seek_seconds(10**12, 200), 7)
    row.update(torch=torch.__version__, python=platform.python_version())
    print(json.dumps(row))


if __name__ == "__main__":
    main()

"""Tokens per second of the loader, the cost of checking blocks and the time of a seek, as one JSON line.

Usage: python packages/forge-data/benchmarks/loader.py [--seq_len 2048] [--global_batch 16]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from forge_data import BuiltinCorpus, Loader, PackedStream, Permutation, TokenFiles
from forge_data.prepare import prepare


def tokens_per_second(
    stream: PackedStream,
    global_batch: int,
    workers: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Of one loader after its first batch, start of the workers left out."""
    loader = Loader(stream, global_batch, num_workers=workers)
    next(loader)
    start = clock()
    for _ in range(steps):
        next(loader)
    seconds = clock() - start
    loader.close()
    return steps * global_batch * stream.seq_len / seconds


def verify_ratios(arguments: argparse.Namespace) -> dict[str, object]:
    """Tokens/s with `verify = "touch"` over those with "off", medians of passes that alternate.

    Of processor time, since all is done in this process: ratios hold on a busy machine too. `first`: a pass over the whole file, in which every block is hashed; `later`: all were hashed before.
    """
    with tempfile.TemporaryDirectory() as place:
        text = Path(place) / "text.txt"
        text.write_text("".join(f"a line of text with the number {i}\n" for i in range(200_000)))
        prepare([text], Path(place) / "tokens")
        rates: dict[str, list[float]] = {"off": [], "first": [], "later": []}
        for _ in range(3 * arguments.repeats):
            folder = Path(place) / "tokens"
            sources = {mode: TokenFiles(folder, verify=mode) for mode in ("off", "touch")}
            for name, mode in (("off", "off"), ("first", "touch"), ("later", "touch")):
                stream = PackedStream(sources[mode], arguments.seq_len)
                batch = arguments.global_batch
                rates[name].append(
                    tokens_per_second(stream, batch, 0, len(stream) // batch - 1, time.process_time)
                )
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "tokens_per_second_verify_off": round(medians["off"]),
        "verify_first_pass_ratio": round(medians["first"] / medians["off"], 3),
        "verify_later_ratio": round(medians["later"] / medians["off"], 3),
        "verify_spread_off": round((max(rates["off"]) - min(rates["off"])) / medians["off"], 3),
    }


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
    row.update(verify_ratios(arguments))
    row["seek_seconds_at_1e12"] = round(seek_seconds(10**12, 200), 7)
    row.update(torch=torch.__version__, python=platform.python_version())
    print(json.dumps(row))


if __name__ == "__main__":
    main()

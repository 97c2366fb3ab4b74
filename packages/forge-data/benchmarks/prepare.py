"""MB of text per second of `prepare` with 1 and 2 workers beside the library's `encode_batch`, as one JSON line.

The library gets texts in memory and keeps nothing; `prepare` reads JSON lines and ends with token files, synced.
Both have the same number of threads. Rounds alternate; medians of rates, and of ratios within a round.

Usage: python packages/forge-data/benchmarks/prepare.py [--megabytes 8] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers

from forge_data import BuiltinCorpus, ByteTokenizer
from forge_data.prepare import merge, prepare

_BATCH = 1000  # texts of a call of the library


def make_documents(num_bytes: int) -> list[str]:
    """Documents of log-normal length from shuffled lines of the built-in text."""
    source, draw = BuiltinCorpus(), random.Random(0)
    lines = ByteTokenizer().decode(source.read(0, source.num_tokens).tolist()).splitlines()
    documents, size = [], 0
    while size < num_bytes:
        count = max(1, round(draw.lognormvariate(3.5, 1.0)))
        documents.append("\n".join(draw.choice(lines) for _ in range(count)) + f" {len(documents)}")
        size += len(documents[-1].encode())
    return documents


def train(documents: list[str], path: Path) -> tokenizers.Tokenizer:
    """A byte-level BPE of 16,000 ids."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=16_000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(path))
    return tokenizer


def encode_batch(tokenizer: tokenizers.Tokenizer, documents: list[str]) -> None:
    """The library alone."""
    for first in range(0, len(documents), _BATCH):
        for encoding in tokenizer.encode_batch(documents[first : first + _BATCH]):
            assert encoding.ids


def seconds(call: Callable[[], object], threads: int, output: Path) -> tuple[float, float]:
    """Wall and processor time of one call with so many threads of the library; the latter without workers'."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    start, processor = time.perf_counter(), time.process_time()
    call()
    spent = time.perf_counter() - start, time.process_time() - processor
    shutil.rmtree(output, ignore_errors=True)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = "2"
    documents = make_documents(arguments.megabytes * 1_000_000)
    size = sum(len(text.encode()) for text in documents) / 1e6
    with tempfile.TemporaryDirectory() as place:
        text, output = Path(place) / "text.jsonl", Path(place) / "out"
        text.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
        model = train(documents[:2000], Path(place) / "bpe.json")

        def run(workers: int, tokenizer: str = str(Path(place) / "bpe.json")) -> None:
            prepare(text, output, workers=workers, tokenizer=tokenizer)

        def merge_all() -> None:
            merge(output)

        cases: dict[str, tuple[Callable[[], object], int]] = {
            "encode_batch_1": (lambda: encode_batch(model, documents), 1),
            "prepare_1": (lambda: run(1), 1),
            "encode_batch_2": (lambda: encode_batch(model, documents), 2),
            "prepare_2": (lambda: run(2), 2),
            "prepare_bytes_1": (lambda: run(1, "byte"), 1),
            "merge_of_bytes": (merge_all, 1),
        }
        rates: dict[str, list[float]] = {name: [] for name in cases}
        processor: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(arguments.rounds):
            for name, (call, threads) in cases.items():
                if name == "merge_of_bytes":
                    prepare(text, output, shard=(0, 1))
                wall, own = seconds(call, threads, output)
                rates[name].append(size / wall)
                processor[name].append(size / own)
    row: dict[str, object] = {"benchmark": "forge-data prepare", **vars(arguments)}
    for name, found in rates.items():
        row[f"mb_per_second_{name}"] = round(statistics.median(found), 2)
        row[f"spread_{name}"] = round((max(found) - min(found)) / statistics.median(found), 3)
    for n in (1, 2):
        pairs = zip(rates[f"prepare_{n}"], rates[f"encode_batch_{n}"], strict=True)
        row[f"ratio_{n}"] = round(statistics.median(ours / theirs for ours, theirs in pairs), 3)
    for name in ("encode_batch_1", "prepare_1", "prepare_bytes_1", "merge_of_bytes"):
        row[f"mb_per_processor_second_{name}"] = round(statistics.median(processor[name]), 2)
    row.update(tokenizers=tokenizers.__version__, python=platform.python_version())
    print(json.dumps(row))


if __name__ == "__main__":
    main()

"""Reading packed rows next to other readers of the same tokens, and tokenizing next to `datasets.map`."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarks.harness import Step
from benchmarks.rows import Row, Setting

IGNORED = -100


def write_tokens(setting: Setting, num_tokens: int) -> Path:
    """A folder of tokens (bytes) with a sidecar and digests; documents have log-normal lengths, 1,000 in the mean."""
    from forge_data.prepare import prepare

    folder, rng = setting.folder / "tokens", np.random.default_rng(0)
    if not folder.exists():
        with (setting.folder / "text.jsonl").open("w") as file:
            while file.tell() < num_tokens:
                length = max(1, int(rng.lognormal(6.4, 1.0)))
                text = rng.integers(97, 123, length, np.uint8).tobytes().decode()
                print(json.dumps({"text": text}), file=file)
        prepare(setting.folder / "text.jsonl", folder)
    return folder


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What a training script of one page does: a map, and rows of it. No document boundaries."""

    def __init__(self, folder: Path, seq_len: int) -> None:
        self.tokens, self.seq_len = np.memmap(folder / "tokens.bin", np.uint16, mode="r"), seq_len

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = row * self.seq_len
        ids = torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))
        return ids[:-1], ids[1:]


def with_documents(folder: Path, seq_len: int, batch: int) -> Iterator[list[torch.Tensor]]:
    """Tokens, labels, positions and document ids (B, S) int64 by numpy in random order; nothing is verified."""
    tokens = np.asarray(np.memmap(folder / "tokens.bin", np.uint16, mode="r"))
    documents = np.asarray(np.memmap(folder / "documents.bin", np.int64, mode="r"))
    order = np.random.default_rng(0).permutation((len(tokens) - 1) // seq_len)
    for first in count(0, batch):
        found = [np.empty((batch, seq_len), np.int64) for _ in range(4)]
        for i in range(batch):
            start = order[(first + i) % len(order)] * seq_len
            ids = tokens[start : start + seq_len + 1]
            found[0][i], found[1][i] = ids[:-1], ids[1:]
            lo, hi = np.searchsorted(documents, [start + 1, start + seq_len + 1])
            boundaries = documents[lo:hi] - start  # each in 1..S
            found[1][i, boundaries - 1] = IGNORED
            begins = np.concatenate([[0], boundaries[boundaries < seq_len]])
            lengths = np.diff(begins, append=seq_len)
            found[2][i] = np.arange(seq_len) - np.repeat(begins, lengths)
            found[3][i] = np.repeat(np.arange(len(begins)), lengths)
        yield [torch.from_numpy(value) for value in found]


class Reading(NamedTuple):
    """Case of the reading row."""

    setting: Setting
    folder: Path
    seq_len: int
    batch: int
    batches: int


def reading(setting: Setting) -> Reading:
    folder = write_tokens(setting, setting.of(100_000_000, 400_000))
    return Reading(setting, folder, setting.of(2048, 128), setting.of(16, 4), setting.of(40, 4))


def read(case: Reading, make: Callable[[], Any]) -> Callable[[], object]:
    """A step that reads some batches, and begins again at the end of the data."""
    batches = (batch for _ in count() for batch in make())
    return lambda: sum(1 for _ in islice(batches, case.batches)) and None


def forge(case: Reading) -> Callable[[], object]:
    from forge_data import Loader, SourceConfig, open_stream

    stream = open_stream(SourceConfig("tokens", str(case.folder)), case.seq_len)
    return read(case, lambda: Loader(stream, case.batch))


def numpy_with_documents(case: Reading) -> Callable[[], object]:
    return read(case, lambda: with_documents(case.folder, case.seq_len, case.batch))


def dataloader(case: Reading) -> Callable[[], object]:
    rows = Rows(case.folder, case.seq_len)
    return read(case, lambda: torch.utils.data.DataLoader(rows, case.batch, shuffle=True))


def datasets_torch(case: Reading) -> Callable[[], object]:
    """Lists of fixed size in an Arrow table, zero-copy from the map, in random order."""
    import pyarrow as pa
    from datasets import Dataset

    tokens = np.memmap(case.folder / "tokens.bin", np.uint16, mode="r")
    rows = len(tokens) // case.seq_len
    buffers = [None, pa.py_buffer(tokens.data)]
    flat = pa.Array.from_buffers(pa.uint16(), rows * case.seq_len, buffers)
    lists = pa.FixedSizeListArray.from_arrays(flat, case.seq_len)
    found = Dataset(pa.table({"tokens": lists})).with_format("torch")
    order = np.random.default_rng(0).permutation(rows)

    def batches() -> Iterator[Any]:
        for first in range(0, rows - case.batch, case.batch):
            yield found[order[first : first + case.batch].tolist()]["tokens"]

    return read(case, batches)


def streaming(case: Reading) -> Callable[[], object]:
    """MosaicML streaming: shuffled MDS shards on the disk behind a DataLoader."""
    from streaming import MDSWriter, StreamingDataset

    tokens = np.memmap(case.folder / "tokens.bin", np.uint16, mode="r")
    width, out = case.seq_len + 1, str(case.setting.folder / "mds")
    with MDSWriter(out=out, columns={"tokens": f"ndarray:uint16:{width}"}) as writer:
        for start in range(0, len(tokens) - width, width):
            writer.write({"tokens": np.asarray(tokens[start : start + width])})
    rows = StreamingDataset(local=out, shuffle=True, batch_size=case.batch)
    return read(case, lambda: torch.utils.data.DataLoader(rows, case.batch))


class Corpus(NamedTuple):
    """Case of the tokenizing row."""

    setting: Setting
    text: Path
    tokenizer: Path


def corpus(setting: Setting) -> Corpus:
    """JSON lines of shuffled words, and a byte-level BPE of 16,000 ids trained on them."""
    import tokenizers

    from forge_data import BuiltinCorpus, ByteTokenizer

    source, draw = BuiltinCorpus(), random.Random(0)
    lines = ByteTokenizer().decode(source.read(0, source.num_tokens).tolist()).splitlines()
    text, size, documents = setting.folder / "words.jsonl", 0, []
    while size < setting.of(8_000_000, 60_000):
        documents.append(
            "\n".join(draw.choices(lines, k=max(1, round(draw.lognormvariate(3.5, 1)))))
        )
        size += len(documents[-1])
    text.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    levels = tokenizers.pre_tokenizers.ByteLevel
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = levels(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=setting.of(16_000, 400), special_tokens=["<|endoftext|>"],
        initial_alphabet=levels.alphabet(), show_progress=False,
    )  # fmt: skip
    model.train_from_iterator(documents[:2000], trainer)
    model.save(str(setting.folder / "bpe.json"))
    return Corpus(setting, text, setting.folder / "bpe.json")


def prepare_forge(case: Corpus) -> Step:
    from forge_data.prepare import prepare

    out = case.setting.folder / "prepared"
    remove = lambda: shutil.rmtree(out, ignore_errors=True)  # noqa: E731
    return Step(
        lambda: prepare(case.text, out, tokenizer=str(case.tokenizer)) and None, before=remove
    )


def prepare_datasets(case: Corpus) -> Step:
    import datasets
    import tokenizers

    datasets.disable_progress_bars()
    model, cache = tokenizers.Tokenizer.from_file(str(case.tokenizer)), case.setting.folder / "hf"

    def encode(rows: dict[str, list[str]]) -> dict[str, Any]:
        return {"ids": [found.ids for found in model.encode_batch(rows["text"])]}

    def step() -> None:
        found = datasets.Dataset.from_json(str(case.text), cache_dir=str(cache))
        found.map(encode, batched=True, remove_columns=["text"])

    return Step(step, before=lambda: shutil.rmtree(cache, ignore_errors=True))


ROWS = [
    Row(
        "data-read", reading,
        {"forge": forge, "datasets": datasets_torch, "streaming": streaming,
         "numpy": numpy_with_documents, "dataloader": dataloader},
        "40 batches of 16 rows of 2,048 tokens, random order, no workers; Forge: labels, positions and document ids, blocks "
        "verified on first touch; numpy: the same without verification; DataLoader, datasets and streaming: tokens only",
        bounds={"dataloader": None, "datasets": 0.65},
        causes={
            "datasets": "its batch is tokens alone. Forge writes four arrays of int64, 1 MB a batch for its 0.26 MB: of its time 46 % "
            "fills tokens and labels, 19 % positions and document ids, 21 % compares ids with the recorded range and blocks "
            "with their digests, 4 % counts labels. numpy, which writes the same arrays without a check, takes longer"
        },
    ),
    Row(
        "data-prepare", corpus, {"forge": prepare_forge, "datasets": prepare_datasets},
        "8 MB of JSON lines, byte-level BPE of 16,000 ids, one process; datasets: from_json and map(batched=True) with "
        "encode_batch, written to Arrow; Forge: token files with digests, synced",
    ),
]  # fmt: skip

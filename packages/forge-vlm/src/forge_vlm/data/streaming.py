"""Stream packed sequences from large files, front to back: V virtual shards, each with shuffle windows of its own.

V   virtual shards        P   chunks of the files        N   sample indices of a call
"""

from __future__ import annotations

import hashlib
import json
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_vlm._config import is_size
from forge_vlm._renamed import renamed
from forge_vlm._shared.paths import files_named, user_path
from forge_vlm._shared.problems import Problem, raise_problems
from forge_vlm._shared.record_keys import RecordKeys
from forge_vlm._shared.sharded_rows import PLACES, ShardedRows
from forge_vlm.data.files import InvalidSample, folder_of, invalid, opened, readable
from forge_vlm.data.formats import lines_of, open_records
from forge_vlm.data.options import fit_problems, problems
from forge_vlm.data.packing import PACKING_VERSION, arrays_of, order_of, plan_rows, too_long
from forge_vlm.data.records import Records
from forge_vlm.data.sample import Sample, SampleEncoder

__all__ = ["STREAMED", "Chunks", "PackedShards", "StreamedSource"]

STREAMED = ("chat", "llava", "webdataset")
_LEAST_BYTES, _MOST_BYTES = 1 << 12, 1 << 26  # bytes of a range of lines
_ENDS = 1 << 16  # bytes at the start and the end of a file that its digest covers
_RANGES = 4  # of a shard, so that shards have about as many lines


class Chunks:
    """The chunks of a file, or of the files in a folder: each `.tar` is one, and lines of `.jsonl` are split by bytes.

    Opening reads names, sizes, and the ends of files for the digest. `open(piece)` reads an index of one: headers of a tar,
    ends of lines. Raises InvalidSample where there are none.
    """

    def __init__(
        self,
        format: str,
        path: str | Path,
        virtual_shards: int,
        keys: RecordKeys | None = None,
        images: str | None = None,
    ) -> None:
        self.format, path, self._keys = format, user_path(path), keys
        self._images = folder_of(images)
        ending = ".tar" if format == "webdataset" else ".jsonl"
        with readable(path):
            if not path.exists():
                rule = "to stream from must exist"
                raise invalid("path", "not_found", str(path), rule, "check it")
            files = files_named(path, suffix=ending) if path.is_dir() else [path]

        if not files or any(file.suffix != ending for file in files):
            rule = f"must be a {ending} file, or a folder of them, to be streamed as {format!r}"
            raise invalid("path", "format", str(path), rule, "convert it, or prepare it")
        self.files = files
        with readable(path):
            sizes = [file.stat().st_size for file in files]

        each = min(_MOST_BYTES, max(_LEAST_BYTES, -(-sum(sizes) // (virtual_shards * _RANGES))))
        self._pieces: list[tuple[Path, int, int]] = []  # file, first byte, byte after the last
        for file, size in zip(files, sizes):
            step = size if format == "webdataset" else each
            self._pieces += [
                (file, at, min(size, at + step)) for at in range(0, size, max(1, step))
            ]

        empty_tar = format == "webdataset" and 0 in sizes  # a full one ends with zeros
        if not self._pieces or empty_tar:
            rule = f"must hold records, and {'a file of it is' if empty_tar else 'its files are'} empty"
            raise invalid("path", "empty", str(path), rule, "check the path")

        self._digest = _digest_of_ends(files)

    def __len__(self) -> int:
        return len(self._pieces)

    def open(self, piece: int) -> Records:
        """The records of a chunk."""
        file, start, stop = self._pieces[piece]
        if self.format == "webdataset":
            return open_records(self.format, file, keys=self._keys, images=self._images)
        return lines_of(self.format, file, start, stop, self._keys, self._images)

    def fingerprint(self) -> dict[str, str | int]:
        """What identifies the files, and how they are split."""
        return {"content": self._digest, "pieces": len(self)}


def _digest_of_ends(files: list[Path]) -> str:
    """Of names, sizes and ends of files."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with opened(path) as file:
            digest.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()


_VERSION = 2  # part of every fingerprint: raise it when a row would change
_LIMITS = {"virtual_shards": 1 << 16, "shuffle_window": 1 << 20}


class StreamedSource:
    """Conversations of `.tar` files or JSON lines that are read while a run trains, without an index of all records.

        talks = StreamedSource("shards/", options_of("shards/", {"format": "webdataset", ...}))
        loader = Loader(talks.stream(seq_len=2048, seed=0), global_batch=16)

    Options are those of `VisionChatSource`, all given but `cache`. Opening reads sizes and ends of files. Raises ValueError for options, InvalidSample for files.
    """

    def __init__(
        self,
        path: str,
        options: dict[str, Any],
        virtual_shards: int = 16,
        shuffle_window: int = 256,
    ) -> None:
        given = {"virtual_shards": virtual_shards, "shuffle_window": shuffle_window}
        raise_problems("source", [*problems(options), *_problems(options, given)])
        self.path, self.reader = path, SampleEncoder(options)
        keys = RecordKeys(options["ignore_keys"], options["strict"], InvalidSample)
        self.pieces = Chunks(options["format"], path, virtual_shards, keys, options["images"])
        self.vocab_size: int | None = self.reader.tokens.vocab_size
        self.tokenizer: dict[str, Any] | None = self.reader.tokens.spec
        self.max_token_id = self.reader.tokens.vocab_size - 1
        self._sizes = given

    def stream(self, seq_len: int, seed: int = 0) -> PackedShards:
        """Rows of `seq_len` in the order of `seed`."""
        return PackedShards(self.pieces, self.reader, seq_len, seed, **self._sizes)

    def fingerprint(self) -> dict[str, str | int]:
        """Digests of the ends of the files and of the options."""
        return {**self.pieces.fingerprint(), "options": _digest(self.reader.identity)}


def _problems(options: Mapping[str, Any], given: Mapping[str, int]) -> Iterator[Problem]:
    if options["format"] not in STREAMED:
        rule = f"must be one of {', '.join(STREAMED)} with streaming"
        fix = "remove streaming, or prepare the files"
        yield Problem("format", "streaming", options["format"], rule, fix)
    for name, value in given.items():
        if not is_size(value, _LIMITS[name]):
            rule = f"must be a whole number from 1 to {_LIMITS[name]}"
            yield Problem(name, "size", value, rule, "leave it out")


class PackedShards(ShardedRows):
    """The endless stream of rows of chunks without an index: sample index i is row `i // V` of shard `i % V`.

    As `ShardedRows`, of samples: those of a window are packed by themselves and the rows shuffled; so rows depend on files,
    options and seed only. A row costs its images, and the tokens of the windows up to it. A shard that this process reads
    holds an index of one chunk, and the tokens of one window; images of a tar are read with their row, those in lines of
    JSON are held with their window.
    """

    def __init__(
        self,
        pieces: Chunks,
        reader: SampleEncoder,
        seq_len: int,
        seed: int = 0,
        *,
        virtual_shards: int = 16,
        shuffle_window: int = 256,
    ) -> None:
        self.pieces, self.reader = pieces, reader
        self.seq_len, self.seed = seq_len, seed
        self.source_lines = [
            f"{len(pieces)} pieces of {len(pieces.files)} files, whose samples and keys are not counted, as they are read "
            "while the run trains"
        ]
        self.left_out = 0  # samples that this process did not take, as too long or damaged
        super().__init__(len(pieces), virtual_shards, shuffle_window)

    def arrays(self, instance_ids: np.ndarray) -> dict[str, Any]:
        """As `arrays_of`, and `shard_places` (N, 3): the place of each sequence's window."""
        rows, places = self.read_rows(instance_ids, operator.getitem)
        options = self.reader.identity
        found = arrays_of(rows, self.seq_len, self.reader, options["positions"], weighted=True)
        return {**found, PLACES: places}

    def model_problems(self, model: Any, where: str) -> list[Problem]:
        """As `fit_problems`, of the rows' options."""
        return fit_problems(self.reader.identity, self.reader.image_id, model, where)

    def fingerprint(self) -> dict[str, str | int]:
        """Everything that determines the rows; a resume compares it."""
        return {
            **{f"source.{key}": value for key, value in self.pieces.fingerprint().items()},
            "source.options": _digest(self.reader.identity),
            "packing.version": PACKING_VERSION,
            "packing.seq_len": self.seq_len,
            "stream.version": _VERSION,
            "stream.virtual_shards": self.num_shards,
            "stream.shuffle_window": self.shuffle_window,
            "order.seed": self.seed,
        }

    def _order(self, name: str, count: int, epoch: int) -> np.ndarray:
        digest = hashlib.sha256(f"forge-vlm shards:{self.seed}:{name}".encode()).digest()
        return order_of(count, int.from_bytes(digest[:8], "big") >> 1, epoch)

    def _items(self, piece: int, start: int) -> Iterator[tuple[int, Sample]]:
        """Samples that fit, with the numbers of their records."""
        records = self.pieces.open(piece)
        for number in range(start, len(records)):
            found = records[number]
            sample, good = self.reader.sample(found)
            if sample.branches is not None:
                rule = "are not read by streaming"
                fix = "prepare the files, or write a record for each answer"
                raise invalid("branches", "streaming", ..., rule, fix, where=found.name)

            if not good and self.reader.corrupt == "skip":
                self._leave_out(f"{found.name} has a picture that is missing or damaged")
            elif len(sample.tokens) <= self.seq_len:
                yield number, sample
            elif self.reader.identity["too_long"] == "raise":
                raise too_long(found.name, len(sample.tokens), self.seq_len, 0)
            else:
                self._leave_out(f"{found.name} has more tokens than seq_len {self.seq_len}")

    def _pack(self, shard: int, place: int, items: Sequence[Sample]) -> list[list[Sample]]:
        lengths = np.array([len(sample.tokens) for sample in items])
        rows = plan_rows(lengths, self.seq_len, self.reader.identity["pack"])
        order = self._order(f"window {shard}", len(rows), place)
        return [[items[i] for i in rows[row]] for row in order]

    def _no_rows(self, shard: int, pieces: Sequence[int]) -> InvalidSample:
        rule = f"of {self.num_shards} must hold samples of at most {self.seq_len} tokens, and its files have none"
        fix = "remove empty files, raise seq_len, or use fewer virtual_shards"
        error: InvalidSample = invalid("shard", "empty", shard, rule, fix)
        return error

    def _leave_out(self, why: str) -> None:
        if not self.left_out:
            print(f"data: {why}, and it is left out; others are counted", file=sys.stderr)
        self.left_out += 1


def _digest(options: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:16]


__getattr__ = renamed(__name__)

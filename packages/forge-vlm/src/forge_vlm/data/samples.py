"""What sources whose samples are counted share: rows, media, and what a resume compares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from forge_vlm._shared.record_keys import unread_keys
from forge_vlm.data.reader import Decoder
from forge_vlm.data.sample import Sample
from forge_vlm.data.stream import RowsOfPictures, stream_of

__all__ = ["Counted", "CountedSamples", "fingerprint_of"]

VERSION = 2  # part of every fingerprint: raise it whenever a row would change


class Counted(NamedTuple):
    """Tokens of each sample, the record that it is of, its pictures and its labels, all (samples,) int64, labels None where
    they are not known; whether a label has another weight than 1, and a sample branches; the number of `records`, and of
    samples without a label; `unread` keys of records, by their number."""

    lengths: np.ndarray
    kept: np.ndarray
    pictures: np.ndarray
    trained: np.ndarray | None
    weighted: bool
    branched: bool
    records: int
    unlearnt: int
    unread: Mapping[str, int] = MappingProxyType({})

    def remarks(self) -> list[str]:
        """Sentences for a user."""
        counts = {
            "are left out, as a picture is missing or damaged": self.records - len(self.kept),
            "have nothing to learn": self.unlearnt,
        }
        return [f"{n} of {self.records} samples {k}" for k, n in counts.items() if n]


class CountedSamples:
    """Base of sources whose samples have numbers; one that has it defines `sample` and `name_of`."""

    path: str
    image_id: int
    vocab_size: int | None
    tokenizer: dict[str, Any] | None

    def __init__(
        self, decoder: Decoder, options: dict[str, Any], counted: Counted, content: str
    ) -> None:
        self.decoder, self.options, self.counted, self.content = decoder, options, counted, content
        self.lengths, self.kept, self.pictured = counted.lengths, counted.kept, counted.pictures > 0
        self.weighted = counted.weighted or options["weigh"] != "token"
        self.branched, self.bidirectional = counted.branched, options.get("bidirectional", "none")

    @property
    def max_token_id(self) -> int:
        """The largest id that a row may hold."""
        assert self.vocab_size is not None
        return self.vocab_size - 1

    @property
    def masked(self) -> int:
        """Pictures that this process could not decode."""
        return self.decoder.masked

    def sample(self, number: int) -> Sample:
        """A sample that rows name."""
        raise NotImplementedError

    def name_of(self, number: int) -> str:
        """What an error calls a sample."""
        raise NotImplementedError

    def media(self, sample: Sample) -> tuple[list[dict[str, Tensor]], bool]:
        """As `Decoder.media`."""
        return self.decoder.media(sample)

    def nothing(self) -> dict[str, Tensor]:
        """Media of no picture."""
        return self.decoder.nothing()

    def forget(self) -> None:
        """As `Samples.forget`."""

    def trained(self, left_out: np.ndarray) -> int | None:
        """Labels of all samples but those with numbers `left_out`; None where they are not known."""
        labels = self.counted.trained
        return None if labels is None else int(np.delete(labels, left_out).sum())

    def summary(self, seq_len: int | None = None) -> str:
        """A line of what rows of `seq_len` tokens train; of all samples without it."""
        long = np.flatnonzero(self.lengths > (seq_len or np.inf))
        pictures, trained = np.delete(self.counted.pictures, long), self.trained(long)
        counts = [f"{len(pictures):,} samples", f"{(pictures > 0).mean():.1%} with images"]
        counts.append(f"{pictures.sum():,} images")
        counts.append(f"{np.delete(self.lengths, long).sum():,} tokens")
        counts += [] if trained is None else [f"{trained:,} trained"]
        line = ", ".join(counts) + unread_keys(self.counted.unread)
        if seq_len is None and self.options["too_long"] == "skip":
            line += (
                "; samples of more than seq_len tokens are counted, and left out when a run starts"
            )
        return line

    def stream(self, seq_len: int, seed: int = 0) -> RowsOfPictures:
        """Rows of `seq_len`; InvalidSample for a sample that is longer, unless it is left out."""
        stream = stream_of(self, self.path, seq_len, seed, self.name_of)
        stream.remarks = self.counted.remarks() + stream.remarks
        stream.source_lines = [self.summary(seq_len)]
        return stream

    def fingerprint(self) -> dict[str, str | int]:
        """Digests of the files, the options and the lengths; pictures in files of their own are named, not read."""
        return fingerprint_of(self.options, self.counted, self.content)


def fingerprint_of(
    options: Mapping[str, Any], counted: Counted, content: str
) -> dict[str, str | int]:
    """That of samples whose files have the digest `content`."""
    said = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    lengths = hashlib.sha256(counted.lengths.astype("<i8").tobytes())
    lengths.update(counted.kept.astype("<i8").tobytes())
    return {
        "kind": f"vlm-{VERSION}",
        "content": content,
        "options": said.hexdigest()[:16],
        "samples": len(counted.lengths),
        "lengths": lengths.hexdigest()[:16],
    }

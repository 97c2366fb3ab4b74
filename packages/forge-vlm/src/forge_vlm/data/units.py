"""Samples of some records as arrays: what a part of a prepared folder holds."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from forge_vlm._shared.record_keys import RecordKeys
from forge_vlm.data.errors import InvalidSample
from forge_vlm.data.prepared import BYTES, FIELDS, NAMED
from forge_vlm.data.reader import Reader
from forge_vlm.data.records import Picture, Records
from forge_vlm.data.sample import Sample
from forge_vlm.data.video import Frame
from forge_vlm.plan import IGNORE
from forge_vlm.resolution import Layout

__all__ = ["COLUMNS", "make_unit"]

#: Types of the arrays of a `Sample`, a value of each token.
COLUMNS = {"tokens": "<u4", "labels": "<i4", "weights": "<f4", "branches": "<i4"}


def make_unit(
    records: Records, reader: Reader, numbers: Iterable[int], pictures: str, keys: RecordKeys
) -> dict[str, np.ndarray]:
    """Arrays of the files of `Prepared`, their ends counted from 0, and `counts`, JSON as bytes."""
    samples: list[Sample] = []
    ends: list[tuple[int, int, int]] = []
    places: list[tuple[int, ...]] = []
    caps: list[tuple[int, ...]] = []
    media = bytearray()
    counts: Counter[str] = Counter()
    unread = keys.counts.copy()  # of units before
    for number in numbers:
        sample, _ = reader.sample(records[number])
        read = [_content(reader, p, i, counts) for p, i in zip(sample.pictures, sample.layouts)]
        damaged = sum(content is None for content in read)
        if damaged and reader.corrupt == "skip":
            counts["left_out"] += 1
            continue
        counts["masked"] += damaged
        clips = iter(sample.clips)
        for picture, layout, content in zip(sample.pictures, sample.layouts, read):
            clip = min(next(clips) for _ in reader.pictures.grids(layout))  # all are of one
            picture.release()
            named = pictures == "name" and isinstance(picture.content, Path) and content is not None
            content = str(picture.content).encode() if named else content or b""
            media += content
            places.append((NAMED if named else BYTES, len(media), len(content), clip, *layout))
            caps.append(tuple(bound or 0 for bound in picture.caps))
        counts["capped"] += any(any(picture.caps) for picture in sample.pictures)
        counts["branched"] += sample.branches is not None
        if sample.branches is None:
            sample = sample._replace(branches=np.zeros(len(sample.tokens), np.int64))
        samples.append(sample)
        tokens = len(sample.tokens) + (ends[-1][1] if ends else 0)
        ends.append((number, tokens, len(places)))
    for sample in samples:
        learnt = sample.labels != IGNORE
        counts["unlearnt"] += not learnt.any()
        counts["trained"] += int(learnt.sum())
        counts["weighted"] += bool((sample.weights[learnt] != 1).any())
    columns = {
        name: np.concatenate([getattr(s, name) for s in samples] or [np.zeros(0)]).astype(dtype)
        for name, dtype in COLUMNS.items()
    }
    return {
        **columns,
        "samples": np.array(ends, "<i8").reshape(-1, 3),
        "pictures": np.array(places, "<i8").reshape(-1, FIELDS),
        "caps": np.array(caps, "<i8").reshape(-1, 2),
        "media": np.frombuffer(bytes(media), np.uint8),
        "counts": np.frombuffer(
            json.dumps({**counts, "unread": keys.counts - unread}).encode(), np.uint8
        ),
    }


def _content(
    reader: Reader, picture: Picture, layout: Layout, counts: Counter[str]
) -> bytes | None:
    """The bytes of a picture that can be decoded; None and its cause counted for another, unless `corrupt` is "raise"."""
    cause = "damaged" if isinstance(picture.content, bytes) else "missing"
    try:
        content = reader.pictures.read(picture)
        cause = "damaged"
        if isinstance(picture, Frame):
            content = _smaller(content)
        reader.decode(Picture(picture.name, content, caps=picture.caps), layout)
    except InvalidSample:
        if reader.corrupt == "raise":
            raise
        counts[cause] += 1
        return None
    return content


def _smaller(bitmap: bytes) -> bytes:
    """A frame of a video, compressed without loss."""
    from PIL import Image

    file = io.BytesIO()
    Image.open(io.BytesIO(bitmap)).save(file, "PNG")
    return file.getvalue()

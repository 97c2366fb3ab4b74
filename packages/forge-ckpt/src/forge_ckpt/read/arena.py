"""Staging memory of a load: parts of files in one piece of memory, without the bytes between them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from forge_ckpt._shared.file_bytes import byte_view
from forge_ckpt.read.blocks import Segment

# Spans that are as near as two neighboring tensors (BlockFile aligns each) are read as one: a block
# full of small tensors is then read into place, and nothing is copied tensor by tensor.
_ALIGN = 64


class Span(NamedTuple):
    """Bytes of a file that a load needs."""

    file: str
    start: int
    length: int


class Arena:
    """Memory for ``spans``, some of which may overlap: what two of them share is read once.

    ``segments`` are to be read (:func:`forge_ckpt.read.blocks.read_segments`); then ``span(i)`` is the
    content of the i-th span. Cost: the bytes of all spans, and less than 128 for each.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        runs: list[list[int]] = []  # [first span, start, end, place in memory]
        self._places = [0] * len(spans)
        size = 0
        for i in sorted(range(len(spans)), key=lambda i: spans[i]):
            file, start, length = spans[i]
            if not runs or file != spans[runs[-1][0]].file or start > runs[-1][2] + _ALIGN:
                # As aligned as in the file, for views of any dtype.
                place = size + (start - size) % _ALIGN
                runs.append([i, start, start, place])
            run = runs[-1]
            run[2] = max(run[2], start + length)
            size = run[3] + run[2] - run[1]
            self._places[i] = run[3] + start - run[1]
        self._lengths = [span.length for span in spans]
        # Pages of 4 KiB: huge ones would save half of the page faults' time (0.15 s of 0.3 s a GB), but
        # where the host takes free memory back, as of many virtual machines, they cost 2 to 4 s a GB.
        self._bytes = torch.empty(size, dtype=torch.uint8)
        view = byte_view(self._bytes)
        self.segments = [
            Segment(spans[first].file, start, view[place : place + end - start])
            for first, start, end, place in runs
        ]

    def span(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """The content of a span as a flat tensor of ``dtype``; it keeps the memory alive."""
        begin = self._places[index]
        found = self._bytes[begin : begin + self._lengths[index]]
        # Forge's writer aligns; a file of another writer may not.
        return (found if begin % dtype.itemsize == 0 else found.clone()).view(dtype)

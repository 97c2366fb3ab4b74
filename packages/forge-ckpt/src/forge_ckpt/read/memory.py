"""Memory of a load: staged parts of files in one piece, and tensors that share memory, such as tied weights."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import ReadItem

from forge_ckpt._shared.file_bytes import byte_view
from forge_ckpt._shared.problems import Problem, invalid, raise_problems
from forge_ckpt.errors import CheckpointMismatch
from forge_ckpt.manifest import ALIGN
from forge_ckpt.read.blocks import Segment
from forge_ckpt.read.planner import ForgeLoadPlanner


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
        # [first span, start, end, place in memory]: a list, because the end grows.
        runs: list[list[int]] = []
        self._places = [0] * len(spans)
        size = 0
        for i in sorted(range(len(spans)), key=lambda i: spans[i]):
            file, start, length = spans[i]
            # Spans that are as near as two neighboring tensors are read as one: a block full of small tensors is then
            # read into place, and nothing is copied tensor by tensor.
            if not runs or file != spans[runs[-1][0]].file or start > runs[-1][2] + ALIGN:
                # As aligned as in the file, so that views of any dtype are possible.
                place = size + (start - size) % ALIGN
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


_ELEMENT_BYTES = 16  # of complex128, the largest: addresses that are a multiple fit every dtype


class _Box(NamedTuple):
    name: str
    device: str
    begin: int  # addresses of the first byte and after the last, to find boxes that overlap
    end: int
    target: torch.Tensor
    source: Any  # its content; None where only the addresses count


def names_in_shared_memory(items: Iterable[ReadItem], planner: ForgeLoadPlanner) -> set[str]:
    """The names of the tensors to be filled that overlap a tensor of another name."""
    boxes = [box for item in items for box in _box(item, None, planner)]
    return {box.name for group in _groups(boxes) for box in group}


def check_shared_memory(
    staged: list[tuple[ReadItem, torch.Tensor]], planner: ForgeLoadPlanner, where: str
) -> None:
    """Raise CheckpointMismatch where a tensor cannot be filled, or would overwrite bytes of another.

    Cost: host memory and two copies of the shared ranges; nothing without shared memory.
    """
    for item, _ in staged:
        found = _unfillable(item.dest_index.fqn, planner.resolve_tensor(item))
        raise_problems(where, found, CheckpointMismatch)
    boxes = [box for item, source in staged for box in _box(item, source, planner)]
    for group in _groups(boxes):
        lost = _overwritten(group)
        if lost is not None:
            others = {box.name for box in group if box.begin < lost.end and lost.begin < box.end}
            names = ", ".join(sorted(others - {lost.name}))
            rule = f"shares memory here with {names}, and they were saved with different values"
            fix, kind = "untie them, or load a checkpoint that was saved tied", CheckpointMismatch
            raise invalid(lost.name, "tied", ..., rule, fix, where=where, kind=kind)


def _box(item: ReadItem, source: torch.Tensor | None, planner: ForgeLoadPlanner) -> Iterator[_Box]:
    """The memory that an item fills, if it is not empty."""
    target = planner.resolve_tensor(item).detach()
    if target.numel():
        last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride()))
        begin = target.data_ptr()
        end = begin + (last + 1) * target.element_size()
        yield _Box(item.dest_index.fqn, str(target.device), begin, end, target, source)


def _unfillable(name: str, target: torch.Tensor) -> Iterator[Problem]:
    """Why torch would refuse to copy into it, when others are filled already."""
    fix = "load into a clone() of it"
    if any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride())):
        rule = "is expanded here: its elements share memory"
        yield Problem(name, "expanded", tuple(target.shape), rule, fix)
    elif target.is_inference() and not torch.is_inference_mode_enabled():
        rule = "was made here in inference mode, and may not change outside"
        yield Problem(name, "inference", ..., rule, fix)


def _groups(boxes: list[_Box]) -> Iterator[list[_Box]]:
    """Groups of boxes of different names with overlapping addresses. Boxes of one name tile it."""
    group: list[_Box] = []
    end = 0
    for box in sorted(boxes, key=lambda box: (box.device, box.begin)):
        if group and (box.device != group[0].device or box.begin >= end):
            if len({other.name for other in group}) > 1:
                yield group
            group, end = [], 0
        group.append(box)
        end = max(end, box.end)
    if len({other.name for other in group}) > 1:
        yield group


def _overwritten(group: list[_Box]) -> _Box | None:
    """The first box that would lose bytes to a later one; None if no bytes are lost.

    All are copied into host memory with the same relative addresses, as the load would fill them, and
    then compared: the state itself must not change before the check.
    """
    base = group[0].begin // _ELEMENT_BYTES * _ELEMENT_BYTES
    end = max(box.end for box in group)
    size = -(-(end - base) // _ELEMENT_BYTES) * _ELEMENT_BYTES
    memory = torch.empty(size, dtype=torch.uint8)
    views = []
    for box in group:
        like, offset = box.target, (box.begin - base) // box.target.element_size()
        view = memory.view(like.dtype).as_strided(like.shape, like.stride(), offset)
        view.copy_(box.source)
        views.append(view)
    return next(
        (box for box, view in zip(group, views) if not equal_bits(view, box.source.to(view.dtype))),
        None,
    )


def equal_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether all bits are equal; nan equals a nan of the same bits."""
    one, two = one.contiguous(), two.contiguous()  # views do not keep their tensors alive
    if not one.numel() or not two.numel():  # torch makes no tensor of an empty buffer
        return one.numel() == two.numel()
    bits = [torch.frombuffer(byte_view(tensor), dtype=torch.uint8) for tensor in (one, two)]
    return torch.equal(*bits)

"""The layout of one rank's data file: which tensor stands at which byte."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from forge_ckpt.write.planner import memory_of

ALIGN = 64  # bytes; each tensor starts at a multiple, so that any dtype can be memory-mapped


@dataclass(frozen=True)
class Piece:
    """A tensor of this rank, on any device and with any strides, and its place in the file."""

    tensor: torch.Tensor
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, row-major."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class FileLayout:
    """The pieces of one file in the order of their bytes, and the write results of all items of the plan."""

    file: str
    size: int
    pieces: tuple[Piece, ...]
    results: list[WriteResult]


def lay_out(plan: SavePlan, planner: SavePlanner, file: str) -> FileLayout:
    """Lay out the items of ``plan`` in the file of that name; nothing is copied. Objects go into the results.

    Tensors that share memory with the same layout, such as tied weights, are one piece.
    """
    pieces: list[Piece] = []
    results: list[WriteResult] = []
    # The pieces hold the tensors: if one were freed, the next could get its address and be taken for it.
    placed: dict[tuple[Any, ...], Piece] = {}
    size = 0
    for item in plan.items:
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            text = data.getvalue().decode()  # type: ignore[union-attr]
            results.append(WriteResult(item.index, len(text), text))
            continue

        assert isinstance(data, torch.Tensor)
        key = memory_of(data)
        if key not in placed or data.numel() == 0:
            placed[key] = Piece(data.detach(), -(-size // ALIGN) * ALIGN)
            pieces.append(placed[key])
            size = placed[key].start + placed[key].nbytes
        piece = placed[key]
        results.append(WriteResult(item.index, piece.nbytes, (file, piece.start, piece.nbytes)))
    return FileLayout(file, size, tuple(pieces), results)

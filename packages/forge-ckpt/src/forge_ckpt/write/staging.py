"""Host memory that holds the bytes of a save while training goes on, laid out like the file."""

import contextlib
import itertools
import logging
import mmap
from collections.abc import Iterator

import torch

from forge_ckpt._shared.file_bytes import byte_view
from forge_ckpt._shared.problems import invalid
from forge_ckpt.write.planner import FileLayout, Piece

logger = logging.getLogger("forge_ckpt")
_WINDOW_BYTES = 64 * 2**20


class StagingArea:
    """Memory for one staged save at a time, kept for the next one.

    ``stage`` copies every piece to its place. CPU tensors are copied when it returns. Of CUDA tensors the
    copies are queued on a stream of their own, into pinned memory: later work on the caller's stream waits
    for them on the device, so an optimizer's step cannot overtake them and the host does not wait.
    ``bytes_of_file`` waits for them, in the thread that writes.

    ``limit_gib``: ``stage`` raises ValueError for a larger file.
    """

    def __init__(self, limit_gib: float | None = None) -> None:
        self._limit_gib = limit_gib
        # (bytes,) uint8; kept between saves, as fresh pages cost time.
        self._memory: torch.Tensor | None = None
        self._pinned = self._for_cuda = False
        self._copied: list[torch.cuda.Event] = []
        self._size = 0

    def stage(self, layout: FileLayout) -> None:
        """Copy all pieces of ``layout``; the staged save before must have been written."""
        self.check(layout.size)
        devices = {piece.tensor.device for piece in layout.pieces}
        cuda = sorted((device for device in devices if device.type == "cuda"), key=str)
        self.reserve(layout.size, for_cuda=bool(cuda))
        assert self._memory is not None
        memory, self._size = self._memory, layout.size
        end = 0
        for piece in layout.pieces:
            memory[end : piece.start].zero_()  # the gap before it: equal states make equal files
            end = piece.start + piece.nbytes

        for device in devices - set(cuda):
            _copy([p for p in layout.pieces if p.tensor.device == device], memory, False)
        self._copied = [
            self._copy_from_cuda([p for p in layout.pieces if p.tensor.device == device], memory)
            for device in cuda
        ]

    def check(self, size: int) -> None:
        """Raise ValueError for a file of ``size`` bytes beyond ``limit_gib``."""
        if self._limit_gib is not None and size > self._limit_gib * 2**30:
            rule = f"is too small for the {size / 2**30:.3g} GiB that this rank saves"
            fix = "raise it, or save with wait=True, which needs no copy"
            raise invalid("staging_gib", "size", self._limit_gib, rule, fix)

    def reserve(self, size: int, for_cuda: bool) -> None:
        """Take memory for a file of ``size`` bytes, and touch it: fresh pages cost more than a copy into them."""
        enough = self._memory is not None and self._memory.numel() >= size
        if not enough or (for_cuda and not self._for_cuda):
            self.release()
            self._memory = _host_memory(max(size, 1)).zero_()
            self._for_cuda = for_cuda
            self._pinned = for_cuda and _pin(self._memory)

    def bytes_of_file(self) -> memoryview:
        """The staged bytes; waits for the copies from devices."""
        for event in self._copied:
            event.synchronize()
        assert self._memory is not None
        return byte_view(self._memory)[: self._size]

    def release(self) -> None:
        """Give the memory back; the next ``stage`` takes new."""
        if self._pinned and self._memory is not None:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._copied = None, []
        self._pinned = self._for_cuda = False

    @staticmethod
    def _copy_from_cuda(pieces: list[Piece], memory: torch.Tensor) -> torch.cuda.Event:
        """Queue the copying on a stream of its own; the event is recorded after the last piece."""
        device = pieces[0].tensor.device
        stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)  # else it copies before the values are computed
        with torch.cuda.stream(stream):
            _copy(pieces, memory, True)
        current.wait_stream(stream)  # else later kernels change the memory before it is copied
        return stream.record_event()


def host_views(layout: FileLayout) -> Iterator[memoryview]:
    """The bytes of each piece on the host, in order; a view is valid until the next one is asked for.

    CPU tensors are read where they are, but for a copy of one that is not contiguous. With CUDA tensors all go
    through pinned windows of 64 MiB (or one larger tensor): the next is copied while one is used, and the host
    waits once a window instead of once a tensor.
    """
    if not any(piece.tensor.device.type == "cuda" for piece in layout.pieces):
        for piece in layout.pieces:
            # held while its bytes are used: a view does not keep it alive
            host = piece.tensor.resolve_conj().resolve_neg().cpu().contiguous()
            yield byte_view(host)
        return

    windows = [*_windows(layout), None]
    areas = StagingArea(), StagingArea()
    try:
        for number, (window, following) in enumerate(itertools.pairwise(windows)):
            assert window is not None
            if number == 0:
                areas[0].stage(window)
            if following is not None:
                areas[(number + 1) % 2].stage(following)
            data = areas[number % 2].bytes_of_file()
            for piece in window.pieces:
                yield data[piece.start : piece.start + piece.nbytes]
    finally:
        for area in areas:
            area.release()


def _windows(layout: FileLayout) -> Iterator[FileLayout]:
    """Consecutive pieces of at most 64 MiB together, or one larger piece, each from byte 0 on."""
    pieces: list[Piece] = []
    for piece in [*layout.pieces, None]:
        first = pieces[0].start if pieces else 0
        if pieces and (piece is None or piece.start + piece.nbytes - first > _WINDOW_BYTES):
            size = pieces[-1].start + pieces[-1].nbytes - first
            moved = tuple(Piece(p.tensor, p.start - first) for p in pieces)
            yield FileLayout(layout.file, size, moved, [])
            pieces = []
        if piece is not None:
            pieces.append(piece)


def _copy(pieces: list[Piece], memory: torch.Tensor, non_blocking: bool) -> None:
    """Copy pieces to their places in ``memory``."""
    with torch.no_grad():
        for piece in pieces:
            target = memory[piece.start : piece.start + piece.nbytes].view(piece.tensor.dtype)
            target.view(piece.tensor.shape).copy_(piece.tensor, non_blocking=non_blocking)


def _host_memory(size: int) -> torch.Tensor:
    """(size,) uint8 in anonymous memory, in huge pages where the system has them: 512 times fewer page faults."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel may have none: small pages only take longer
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin(memory: torch.Tensor) -> bool:
    """Page-lock ``memory``; False, after a warning, where the system refuses: copies then block the host.

    Not ``pin_memory=True``: torch's allocator rounds up to a power of two and never gives it back.
    """
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if error:
        logger.warning(
            "%.3g GiB of staging memory cannot be pinned (CUDA error %d): saves will block for longer; raise the limit "
            "of locked memory (ulimit -l)", memory.numel() / 2**30, error,
        )  # fmt: skip
    return not error

"""Host memory that holds the bytes of a save while training goes on, laid out like the file."""

import contextlib
import logging
import mmap

import torch

from forge_ckpt.files import byte_view
from forge_ckpt.write.layout import FileLayout, Piece

logger = logging.getLogger("forge_ckpt")


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
        self._memory: torch.Tensor | None = None  # (bytes,) uint8
        self._pinned = False
        self._copied: list[torch.cuda.Event] = []
        self._size = 0

    def stage(self, layout: FileLayout) -> None:
        """Copy all pieces of ``layout``; the staged save before must have been written."""
        self.check(layout.size)
        devices = {piece.tensor.device for piece in layout.pieces}
        cuda = sorted((device for device in devices if device.type == "cuda"), key=str)
        memory = self._reserve(layout.size, pinned=bool(cuda))
        self._size = layout.size
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
            raise ValueError(
                f"staging_gib {self._limit_gib:g} is too small for the {size / 2**30:.3g} GiB that this rank "
                "saves; raise it, or save with wait=True, which needs no copy"
            )

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
        self._memory, self._pinned, self._copied = None, False, []

    def _reserve(self, size: int, pinned: bool) -> torch.Tensor:
        enough = self._memory is not None and self._memory.numel() >= size
        if not enough or (pinned and not self._pinned):
            self.release()
            self._memory = _host_memory(max(size, 1))
            self._pinned = pinned and _pin(self._memory)
        assert self._memory is not None
        return self._memory

    @staticmethod
    def _copy_from_cuda(pieces: list[Piece], memory: torch.Tensor) -> torch.cuda.Event:
        device = pieces[0].tensor.device
        stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)  # the kernels that compute the values
        with torch.cuda.stream(stream):
            _copy(pieces, memory, True)
        current.wait_stream(stream)  # the kernels that change or reuse their memory
        return stream.record_event()


def _copy(pieces: list[Piece], memory: torch.Tensor, non_blocking: bool) -> None:
    with torch.no_grad():
        for piece in pieces:
            target = memory[piece.start : piece.start + piece.nbytes].view(piece.tensor.dtype)
            target.view(piece.tensor.shape).copy_(piece.tensor, non_blocking=non_blocking)


def _host_memory(size: int) -> torch.Tensor:
    """(size,) uint8 in anonymous memory, in huge pages where the system has them: 512 times fewer page faults."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
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

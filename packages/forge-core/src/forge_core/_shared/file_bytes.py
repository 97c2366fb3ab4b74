# Copied from scripts/shared/file_bytes.py; edit that file, then run scripts/copy_shared.py.
"""Bytes of tensors and files: views without numpy, complete reads and writes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from .problems import invalid


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes; the view does not keep it alive."""
    assert tensor.device.type == "cpu", "stage the tensor first"
    assert tensor.is_contiguous(), "stage the tensor first"
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    if tensor.data_ptr() == 0:  # a view of address 0 would crash the process when it is read
        rule = f"is the shape of a {type(tensor).__name__} without memory of its own"
        raise invalid("tensor", "memory", tuple(tensor.shape), rule)
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def read_at(fd: int, view: memoryview, offset: int) -> int:
    """Fill ``view`` from ``offset``; returns the bytes read, fewer only at the end of the file."""
    done = 0  # one call reads at most 2 GiB, and fewer bytes after a signal
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_at(fd: int, view: memoryview, offset: int) -> None:
    """Write all of ``view`` at ``offset``; repeats short writes until an OSError names the cause."""
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def write_new_file(path: Path, data: bytes) -> None:
    """Write ``data`` to a new file and fsync it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        write_at(fd, memoryview(data), 0)
        os.fsync(fd)
    finally:
        os.close(fd)

"""Objects travel between processes over a socket: a header and the bytes of arrays, without shared memory.

A message is a count n, n sizes (both int64, little-endian), and n parts: a pickle, then the buffers that it refers to.
Arrays are written from their own memory and read into new memory, one copy each way through the kernel.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_MOST_PARTS = 1 << 20


def parts_of(value: Any) -> list[Any]:
    """The parts of a message. Tensors travel as bytes of the host, of any dtype, without gradients."""
    buffers: list[Any] = []
    file = io.BytesIO()
    _Pickler(file, 5, buffer_callback=lambda b: buffers.append(b.raw())).dump(value)
    return [file.getbuffer(), *buffers]


def send(to: socket.socket, parts: list[Any]) -> None:
    """Write a message; blocks until the other side has taken it."""
    sizes = [part.nbytes for part in parts]
    to.sendall(struct.pack(f"<{len(sizes) + 1}q", len(sizes), *sizes))
    for part in parts:
        to.sendall(part)


def receive(source: socket.socket, idle: Callable[[], None] | None = None) -> Any:
    """Read a message. Raises EOFError where the other side is gone.

    With a timeout of the socket, `idle` is called whenever nothing came for that long; it may raise.
    """
    (count,) = struct.unpack("<q", _read(source, 8, idle))
    assert 0 < count <= _MOST_PARTS, "a message begins with the count of its parts"
    sizes = struct.unpack(f"<{count}q", _read(source, 8 * count, idle))
    first, *buffers = [_read(source, size, idle) for size in sizes]
    return pickle.loads(first, buffers=buffers)


def _read(source: socket.socket, size: int, idle: Callable[[], None] | None) -> memoryview:
    """The next bytes, in new memory that can be written to."""
    found = np.empty(size, np.uint8).data  # a bytearray would be filled with zeros first
    done = 0
    while done < size:
        try:
            got = source.recv_into(found[done:])
        except TimeoutError:
            assert idle is not None
            idle()
            continue
        except ConnectionError as error:
            raise EOFError from error
        if not got:
            raise EOFError
        done += got
    return found


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        flat = value.detach().contiguous().reshape(-1)
        # one without elements may have any strides, with which its bytes cannot be seen
        flat = flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8)
        return _tensor, (flat.numpy(), value.dtype, tuple(value.shape))


def _tensor(content: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not content.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(content).view(dtype).reshape(shape)

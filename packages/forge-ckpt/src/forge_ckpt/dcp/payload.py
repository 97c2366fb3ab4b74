"""The payloads of a DCP directory: archives of ``torch.save``, loaded with ``weights_only`` and then checked."""

import io
import os
import re
import zipfile
from typing import IO, Any

import torch
from torch import Tensor

from forge_ckpt._shared.file_bytes import read_at
from forge_ckpt._shared.problems import ProblemError, invalid
from forge_ckpt.dcp.listing import Payload
from forge_ckpt.errors import corrupt, restated
from forge_ckpt.files import Directory

_EXPANSION = 64  # values of an object, at most, for each byte of its payload

_MAX_DEPTH = 100  # of containers in an object


def load_tensor(
    directory: Directory, payload: Payload, name: str, sizes: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The dense CPU tensor of a payload; raises CorruptCheckpoint unless it has ``sizes`` and ``dtype``."""
    value, records = _load(directory, payload, name)
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        raise corrupt("", name, type(value).__name__, "must be a dense tensor", code="type")
    if (found := (tuple(value.shape), value.dtype)) != (sizes, dtype):
        raise corrupt("", name, found, f"must be {sizes} {dtype}, as listed", code="mismatch")
    _check_storage(value, records, name)
    return value.detach()


def load_object(directory: Directory, payload: Payload, name: str) -> Any:
    """The value of a payload: containers, strings, numbers, tensors; no larger than its bytes allow."""
    value, records = _load(directory, payload, name)
    budget, todo = _EXPANSION * payload.length, [(value, 0)]
    # Lists that hold each other many times over are small in a pickle and endless in JSON.
    while todo:
        item, depth = todo.pop()
        budget -= 1
        children: list[Any] = []
        if isinstance(item, str | bytes):
            budget -= len(item)
        elif isinstance(item, dict):
            children = [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            children = [*item]
        elif isinstance(item, Tensor):
            _check_storage(item, records, name)
            budget -= item.numel() * item.element_size()

        if budget < 0 or depth > _MAX_DEPTH:
            raise corrupt("", name, ..., "is deeper or larger than its bytes allow", code="expands")
        todo += [(child, depth + 1) for child in children]
    return value


def _load(directory: Directory, payload: Payload, name: str) -> tuple[Any, set[int]]:
    """The value and the sizes of the tensors' records in the archive."""
    where = f"{directory.path / payload.file} at byte {payload.start}"
    fd, _ = directory.open(payload.file)
    with open(fd, "rb", buffering=0):
        view = io.BufferedReader(_Slice(fd, payload))
        try:
            records = _check_archive(view, payload.length, name)
            view.seek(0)
            return torch.load(view, map_location="cpu", weights_only=True), records
        except (OSError, MemoryError):
            raise
        except ProblemError as error:
            raise restated(error, where) from None
        except Exception as error:  # torch.load raises nearly every class for damaged bytes
            found = re.search(r"Unsupported .*|GLOBAL \S+", str(error))
            if found:
                shown = found[0].partition(". ")[0][:120]
                rule = "needs more than plain values, and nothing is unpickled"
                fix = f"leave it out with --without '{name}'"
                raise invalid(name, "pickle", shown, rule, fix, where=where) from None

            text = str(error).partition("\n")[0]
            rule = f"is not an archive of torch.save ({type(error).__name__}: {text:.200})"
            raise corrupt(where, name, ..., rule, code="damaged") from None


def _check_archive(view: IO[bytes], length: int, name: str) -> set[int]:
    """Refuse an archive that torch.save does not write and torch.load would read: compressed, or big-endian."""
    with zipfile.ZipFile(view) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise invalid(name, "compressed", ..., "has compressed records")
        if sum(entry.file_size for entry in entries) > length:
            raise invalid(name, "larger", ..., "has records that are larger than the payload")
        orders = [e for e in entries if e.filename.endswith("/byteorder")]
        if any(archive.read(entry) != b"little" for entry in orders):
            raise invalid(name, "byte_order", ..., "has numbers that are not little-endian")
    return {entry.file_size for entry in entries if "/data/" in entry.filename}


def _check_storage(tensor: Tensor, records: set[int], name: str) -> None:
    # Some versions of torch do not compare the size that the pickle gives with the record's.
    size = tensor.untyped_storage().nbytes()
    if size and size not in records:
        raise corrupt("", name, size, "bytes of storage are not in the payload", code="storage")


class _Slice(io.RawIOBase):
    """The bytes of a payload as a file of their own."""

    def __init__(self, fd: int, payload: Payload) -> None:
        self._fd, self._payload, self._position = fd, payload, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._payload.length}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._payload.length - self._position)]
        count = read_at(self._fd, view, self._payload.start + self._position)
        self._position += count
        return count

# Copied from scripts/shared/safetensors_folder.py; edit that file, then run scripts/copy_shared.py.
"""A folder of weights as transformers saves it: one safetensors file, or shards with an index."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from .file_bytes import byte_view, read_at
from .paths import user_path
from .problems import invalid
from .safetensors_headers import AGAIN, Entry, open_regular, read_header, read_json

STEM = "model"
FILE, INDEX = f"{STEM}.safetensors", f"{STEM}.safetensors.index.json"
_SHARD = re.compile(r"(?!\.)[\w.\-]{1,200}\.safetensors")
_BLOCK = 2**24  # bytes of a comparison
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class HFFolder:
    """The tensors of a Hugging Face folder by name; each is read when it is asked for, with one read.

        folder = HFFolder("Qwen3-0.6B"); folder.read("model.norm.weight")

    Raises ValueError with one line for a folder without safetensors, a header or an index that the
    format does not allow, shards that are missing, and names that the index and the shards do not share; names that match
    ``optional``, patterns of fnmatch, may be in the index only, as exporters leave a tied head there.
    """

    def __init__(self, path: str | os.PathLike[str], optional: Sequence[str] = ()) -> None:
        self.path, self._optional = user_path(path), optional
        if not self.path.is_dir():
            fix = f"give one with config.json and {FILE}"
            raise invalid("path", "not_found", str(self.path), "is not a folder", fix)
        self.entries: dict[str, Entry] = {}
        index = self.path / INDEX
        if index.exists():
            self._read_shards(index)
        elif (self.path / FILE).exists():
            self.entries = read_header(self.path / FILE)
        else:
            pickles = [name for name in _PICKLES if (self.path / name).exists()]
            why = f"only {pickles[0]}, a pickle that could run code" if pickles else "none"
            rule = f"must hold {FILE} or {INDEX}, and there is {why}"
            raise invalid("path", "missing", str(self.path), rule, "save the model as safetensors")

    def _read_shards(self, index: Path) -> None:
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
            rule = "must map names to files"
            raise invalid("weight_map", "type", ..., rule, AGAIN, where=index)

        for file in dict.fromkeys(table.values()):
            if not _SHARD.fullmatch(file):
                rule = "must be a plain name that ends in .safetensors"
                raise invalid("weight_map", "name", file[:80], rule, AGAIN, where=index)
            found = read_header(self.path / file)
            listed = {name for name, other in table.items() if other == file}
            lost = {n for n in listed - found.keys() if not matches(n, self._optional)}
            if wrong := lost | (found.keys() - listed):
                name = min(wrong)
                here = "file" if name in found else "index"
                rule = f"must be in {file} and in the index, and is only in the {here}"
                raise invalid("weight_map", "mismatch", name[:80], rule, AGAIN, where=index)
            self.entries |= found

    def meta(self) -> dict[str, Tensor]:
        """Every tensor by name on the meta device: shapes and dtypes."""
        return {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            for name, entry in self.entries.items()
        }

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU. Raises ValueError where the file has become shorter, and for NaN or infinite values."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        fd, _ = open_regular(entry.file)
        with open(fd, "rb", buffering=0):
            if read_at(fd, byte_view(tensor), entry.start) != entry.length:
                raise invalid(name, "truncated", ..., "is incomplete", AGAIN, where=entry.file)
        # by the extremes, which take no memory; 8-bit types have none
        if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel():
            extremes = torch.stack(tensor.aminmax())
            if not extremes.isfinite().all():
                rule, fix = "has values that are NaN or infinite", "repair the file"
                raise invalid(name, "not_finite", extremes.tolist(), rule, fix, where=entry.file)
        return tensor

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes. Memory: two blocks."""
        one, other = self.entries[first], self.entries[second]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        with open(one.file, "rb") as a, open(other.file, "rb") as b:
            a.seek(one.start)
            b.seek(other.start)
            sizes = (min(_BLOCK, one.length - done) for done in range(0, one.length, _BLOCK))
            return all(a.read(size) == b.read(size) for size in sizes)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns of fnmatch is that of the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)

"""Tensors of a folder of Hugging Face that are no part of the model, such as a tokeniser of images: an export gives them
back."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from forge_ckpt import SavedTensors
from forge_ckpt.hf import HFFolder, HFTensors, Row, save_hf

__all__ = ["joined", "keep_beside", "rows_beside"]

_NAME = "beside"


def keep_beside(folder: Path, patterns: Sequence[str], kept: Path) -> None:
    """Copy the tensors of `folder` whose names match into a folder of their own in `kept`. Memory: all of them."""
    shutil.rmtree(kept / _NAME, ignore_errors=True)  # of a start that was killed
    source = HFFolder(folder, optional=["*lm_head.weight"])  # a tied head may be in the index only
    names = [n for n in source.entries if any(fnmatchcase(n, p) for p in patterns)]
    if names:
        save_hf(kept / _NAME, _same(names), {name: source.read(name) for name in names})


def rows_beside(kept: Path) -> list[Row]:
    """The rows of what was kept, which has its name on both sides; none where nothing was."""
    return _same(HFFolder(kept / _NAME).entries) if (kept / _NAME).is_dir() else []


def _same(names: Any) -> list[Row]:
    return [(name, name, ()) for name in names]


class _Joined:
    """The tensors of two, as `save_hf` reads them."""

    def __init__(self, first: Any, second: Any) -> None:
        self._first, self._second = first, second
        self.meta = {**first.meta, **second.meta}

    def read(self, name: str) -> Tensor:
        """The tensor of the one that has it."""
        found: Tensor = (self._first if name in self._first.meta else self._second).read(name)
        return found


class _Weights:
    """The weights of a checkpoint by the names that the model has."""

    def __init__(self, saved: SavedTensors) -> None:
        self._saved, self.meta = saved, saved.below("model")

    def read(self, name: str) -> Tensor:
        return self._saved.read(f"model.{name}")


@contextlib.contextmanager
def joined(weights: Any, kept: Path) -> Iterator[Any]:
    """`weights`, the path of a checkpoint or what reads tensors (`meta`, `read(name)`), and what was kept beside."""
    with contextlib.ExitStack() as opened:
        if isinstance(weights, Path):
            weights = _Weights(opened.enter_context(SavedTensors(weights)))
        yield _Joined(weights, HFTensors(kept / _NAME, rows_beside(kept)))

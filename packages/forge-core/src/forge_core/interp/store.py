"""Activations of a model, kept in memory or on disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forge_core._shared.problems import invalid
from forge_core.interp.points import (
    HookPoint,
    Whole,
    batch_first,
    batch_size,
    select_hooks,
    visited,
)


class ActivationStore:
    """Values of hook points in every call of a model inside of `watch`.

        store = ActivationStore(["layers.*.resid_post"], max_bytes=10**9)
        with store.watch(model):
            for tokens in batches:
                model(tokens)
        store["layers.0.resid_post"]      # (sequences, S, M) on the CPU, without graph

    `points` are patterns (see `forge_core.interp.points`). Of the sequences, counted over all calls, each `every`-th is
    kept. `dtype` of floating values; by default their own. With `folder`, an empty or new directory, values are files
    there, one for each hook point and call, and memory holds one value at a time: read them by `chunks`.

    A value that would exceed `max_bytes` raises ValueError before it is kept: scores of 8,192 tokens are 256 MB a head.
    The model computes the same as without; scores and weights of attention are computed next to it.

    The values are those of this process: shards where ranks share sequences or heads. With `whole`
    (`forge_parallel.points.UnshardedPoints`) each of these ranks keeps full values, which costs one gather of a value for each
    axis that shards it; at the end of `watch` the stages of a pipeline exchange the values of their blocks. All of these
    ranks then watch the same hook points, each with its own folder.
    """

    changes = False

    def __init__(
        self,
        points: str | Iterable[str],
        *,
        every: int = 1,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        folder: str | Path | None = None,
        max_bytes: int | None = None,
        whole: Whole | None = None,
    ) -> None:
        if every < 1:
            raise invalid("every", "range", every, "must be 1 or more", "use 1 to keep all")
        self.points = (points,) if isinstance(points, str) else tuple(points)
        self.every, self.dtype, self.device = every, dtype, torch.device(device)
        self.max_bytes, self.whole = max_bytes, whole
        self.folder = None if folder is None else _empty_folder(Path(folder))
        #: Sequences of all calls so far, kept or not, and bytes of those kept.
        self.rows = self.nbytes = 0
        self._kept: dict[str, list[Tensor]] = {}
        self._hooks: dict[str, HookPoint] = {}  # of the model that is watched
        self._pending: dict[str, Tensor] = {}  # of the call that runs
        self._pending_bytes = 0
        self._files: list[Path] = []  # of pending values
        self._batch: int | None = None  # sequences of the call that runs

    @property
    def names(self) -> list[str]:
        """The hook points that are kept, in the order of `points_of`."""
        return list(self._kept)

    def __getitem__(self, name: str) -> Tensor:
        """All values of a hook point. ValueError if sequences of calls had different lengths: read `chunks` then."""
        found = self.chunks(name)
        if not found:
            fix = f"call the model inside of watch, every={self.every}"
            raise invalid(name, "empty", ..., "has no values yet", fix)
        shapes = {tuple(value.shape[1:]) for value in found}
        if len(shapes) > 1:
            rule = f"has values of shapes {sorted(shapes)}, which are not one tensor"
            raise invalid(name, "shape", ..., rule, f"read chunks({name!r})")
        return found[0] if len(found) == 1 else torch.cat(found)

    def chunks(self, name: str) -> list[Tensor]:
        """The values of a hook point, one for each call that kept some; memory-mapped files if there is a folder."""
        if name not in self._kept:
            raise KeyError(
                f"{name!r} is not kept; those kept are {', '.join(self._kept) or 'none yet'}"
            )
        return list(self._kept[name])

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[ActivationStore]:
        """Keep the values of calls of `model` inside this context.

        ValueError for a pattern without a hook point, a hook point in compiled code, and one that a call did not reach or
        reached twice.
        """
        names, self._hooks = select_hooks(model, self.points, self.whole)
        for name in names:
            self._kept.setdefault(name, [])

        # the model's hooks first and last: the batch is known before any visit, and a call counts when all are done
        before, bytes_before = {name: len(self._kept[name]) for name in names}, self.nbytes
        begin = model.register_forward_pre_hook(
            self._on_forward_begin, with_kwargs=True, prepend=True
        )
        try:
            with visited(self._hooks, self):
                end = model.register_forward_hook(lambda *_: self._on_forward_end())
                try:
                    yield self
                finally:
                    end.remove()
        finally:
            begin.remove()
            self._drop()

        if self.whole is not None:
            left = None if self.max_bytes is None else self.max_bytes - bytes_before
            found = {name: self._kept[name][before[name] :] for name in self._hooks}
            for name, value in self.whole.exchange(found, left):
                self._kept[name].append(self._put(name, value.to(self.device)))
                self.nbytes += value.nbytes
            self._files = []

    def reserve(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        """ValueError if a value of this shape does not fit."""
        if self._batch is None or self.max_bytes is None:
            return
        kept = len(range(*self._slice(shape[0]).indices(shape[0])))
        self._check_bytes(name, (kept, *shape[1:]), dtype)

    def _check_bytes(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """ValueError if a value would exceed `max_bytes`."""
        if self.max_bytes is None:
            return
        size = math.prod(shape) * self._dtype(dtype).itemsize
        total = self.nbytes + self._pending_bytes + size
        if total > self.max_bytes:
            rule = f"must be {total} or more for {name} {tuple(shape)}"
            fix = f"raise it, keep fewer of them, or fewer sequences (every={self.every})"
            raise invalid("max_bytes", "full", self.max_bytes, rule, fix)

    def visit(self, name: str, value: Tensor) -> Tensor:
        """Keep sequences of `value`; return it unchanged."""
        if self._batch is None:
            return value  # a recomputation in the backward, or a call of a submodule
        if name in self._pending:
            rule = "was reached twice in one call, so that its values are not those of the tokens"
            raise invalid(name, "twice", ..., rule, "watch a call that runs each block once")

        found = batch_first(value.detach(), self._batch)[self._slice(self._batch)]
        if self.whole is not None and len(found):
            found = self.whole.join(self._hooks[name], found)
        self._check_bytes(name, found.shape, found.dtype)
        found = found.to(self.device, self._dtype(value.dtype), copy=True)
        self._pending_bytes += found.nbytes
        self._pending[name] = self._put(name, found)
        return value

    def _slice(self, batch: int) -> slice:
        """The sequences of a call to keep."""
        return slice(-self.rows % self.every, batch, self.every)

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a value of `dtype` is kept."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    def _put(self, name: str, value: Tensor) -> Tensor:
        """Return `value`, or a memory-mapped file of it."""
        if self.folder is None or not value.numel():
            return value
        path = self.folder / f"{name}.{len(self._kept[name]):06d}.bin"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            rule = f"holds a file of another store, {path.name}"
            fix = "give each a folder of its own"
            raise invalid("folder", "exists", str(self.folder), rule, fix) from None

        self._files.append(path)
        options: Any = {"shared": True, "size": value.numel(), "dtype": value.dtype}
        torch.from_file(str(path), **options).copy_(value.flatten())
        return torch.from_file(str(path), **options).view(value.shape)

    def _on_forward_begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._drop()  # the values of a call that failed
        self._batch = batch_size(module, args, kwargs)

    def _on_forward_end(self) -> None:
        """Keep the pending values; ValueError if the call did not reach a hook point."""
        missing = [name for name in self._hooks if name not in self._pending]
        if missing:
            self._drop()
            rule = "must be reached by each call that is watched, and was not"
            fix = "name those that are, and call the model on full sequences without a cache for attn_scores and attn_weights"
            raise invalid(missing[0], "not_reached", ..., rule, fix)

        for name in self._hooks:
            value = self._pending[name]
            if len(value):
                self._kept[name].append(value)
        self.nbytes += self._pending_bytes
        assert self._batch is not None
        self.rows += self._batch
        self._files = []
        self._drop()

    def _drop(self) -> None:
        """Forget the pending values, and remove their files."""
        for path in self._files:
            path.unlink()
        self._files = []
        self._pending, self._pending_bytes, self._batch = {}, 0, None


def _empty_folder(folder: Path) -> Path:
    """Create `folder`; ValueError if it holds files."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        rule = "holds files, and must be empty or new"
        raise invalid("folder", "not_empty", str(folder), rule, "name another one")
    return folder

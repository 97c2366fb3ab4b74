"""Saves and loads next to torch.distributed.checkpoint (DCP) and torch.save; each save is on the disk when its clock stops.

DCP has its best settings: two writing threads, one file for each, synced; for saves in the background a stager that keeps
its buffers. DCP and torch.save have no digests. Loads fill existing tensors from the page cache.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.harness import Step
from benchmarks.rows import Row, Setting
from torch import Tensor

BEST = {"thread_count": 2, "single_file_per_rank": True, "sync_files": True}


class Saved(NamedTuple):
    """Case: a state and where it goes."""

    setting: Setting
    state: dict[str, Tensor]


def saved(setting: Setting, small: int = 0) -> Saved:
    """`small` tensors of up to 1,000 elements, or the fp32 parameters and moments of a model: 1 GB."""
    if small:
        shapes = {f"layers.{i}.w": (1 + i * 37 % 1000,) for i in range(setting.of(small, 50))}
    else:
        dim, layers = setting.of((1024, 4), (16, 1), (2048, 12))
        shapes = {"embedding": (32 * dim, dim)}
        for layer in range(layers):
            for i, shape in enumerate([(dim, dim)] * 4 + [(4 * dim, dim), (dim, 4 * dim), (dim,)]):
                shapes[f"layers.{layer}.{i}"] = shape
        shapes = {
            f"{kind}.{n}": s
            for kind in ("model", "exp_avg", "exp_avg_sq")
            for n, s in shapes.items()
        }
    return Saved(setting, {name: torch.randn(shape) for name, shape in shapes.items()})


Write = Callable[[Path, dict[str, Tensor]], object]


def save_step(write: Write) -> Callable[[Saved], Step]:
    """Saves to a new path each time; the path before is removed outside of the clock."""

    def make(case: Saved) -> Step:
        paths = (case.setting.folder / f"{write.__name__}-{i}" for i in count())
        last: list[Path] = []

        def before() -> None:
            for path in last:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            last[:] = [next(paths)]
            touch_memory(case.state)

        return Step(lambda: write(last[0], case.state) and None, before)

    return make


def touch_memory(state: dict[str, Tensor]) -> None:
    """Sync the disk and touch free memory of two states: the host of a virtual machine may have taken it back."""
    os.sync()
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = sum(tensor.nbytes for tensor in state.values())
    torch.empty(min(2 * size, free // 2), dtype=torch.uint8).zero_()


def load_step(write: Write, read: Write) -> Callable[[Saved], Step]:
    """Fills the tensors from a save; returns their checksums."""

    def make(case: Saved) -> Step:
        path, state = (
            case.setting.folder / write.__name__,
            {n: t.clone() for n, t in case.state.items()},
        )
        write(path, state)

        def before() -> None:
            for tensor in state.values():
                tensor.zero_()
            for file in [path] if path.is_file() else filter(Path.is_file, path.rglob("*")):
                file.read_bytes()  # into the page cache, which direct writes went past
            touch_memory(state)

        def run() -> Tensor:
            read(path, state)
            return checksums

        checksums = torch.zeros(len(state), dtype=torch.float64)

        def after() -> None:
            for i, tensor in enumerate(state.values()):
                checksums[i] = tensor.view(torch.int32).sum()

        return Step(run, before, after)

    return make


def forge(path: Path, state: dict[str, Tensor]) -> None:
    from forge_ckpt import Store

    with Store(path) as store:
        store.save(1, {"x": state})


def forge_load(path: Path, state: dict[str, Tensor]) -> None:
    from forge_ckpt import Store

    with Store(path, read_only=True) as store:
        store.load({"x": state})


def dcp(path: Path, state: dict[str, Tensor]) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"x": state}, storage_writer=dcp.FileSystemWriter(path, **BEST), no_dist=True)


def dcp_load(path: Path, state: dict[str, Tensor]) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load({"x": state}, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def torch_save(path: Path, state: dict[str, Tensor]) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def torch_load(path: Path, state: dict[str, Tensor]) -> None:
    found = torch.load(path, weights_only=True)
    for name, tensor in state.items():
        tensor.copy_(found[name])


# ---- in the background: the clock stops when training goes on


def background_forge(case: Saved) -> Step:
    from forge_ckpt import Store

    store, steps = Store(case.setting.folder / "background", keep_last=1), count(1)
    case.setting.stack.callback(store.close)
    return Step(lambda: store.save(next(steps), {"x": case.state}, wait=False), after=store.wait)


def background_dcp(case: Saved) -> Step:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    if not dist.is_initialized():  # async_save needs a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        case.setting.stack.callback(dist.destroy_process_group)
    pinned = torch.cuda.is_available()
    stager = DefaultStager(StagingOptions(pinned, pinned, pinned, pinned))
    paths, running = (case.setting.folder / f"background-{i}" for i in count()), []

    def run() -> None:
        writer = dcp.FileSystemWriter(next(paths), **BEST)
        made: Any = dcp.async_save({"x": case.state}, storage_writer=writer, async_stager=stager)
        running.append((getattr(made, "upload_completion", made), writer.path))

    def after() -> None:
        future, path = running.pop()
        future.result()
        shutil.rmtree(path)

    return Step(run, after=after)


_SAVES = {"forge": save_step(forge), "dcp": save_step(dcp), "torch_save": save_step(torch_save)}
_LOADS = {
    "forge": load_step(forge, forge_load),
    "dcp": load_step(dcp, dcp_load),
    "torch_save": load_step(torch_save, torch_load),
}
_SETTINGS = (
    "DCP: two threads, one file each, synced; torch.save: fsync, loaded and copied; both without digests; Forge: sha256 of "
    "each block of 4 MiB, verified before tensors change"
)
_CAUSE = (
    "sha256 of 1 GB takes 0.24 s on both cores, at the 2.1 GB/s of the limits; DCP checks nothing. The rest of a save is the "
    "disk's, whose time differs twofold from round to round"
)
_STATES = {
    "1gb": (0, "1 GB of fp32 parameters and moments; "),
    "5000": (5000, "5,000 tensors of up to 1,000 elements; "),
}
ROWS = [
    *(
        Row(f"checkpoint-{verb}-{name}", saved, sides, text + _SETTINGS, {"small": small},
            {"torch_save": None}, causes={"dcp": _CAUSE}, tolerance=tolerance, warmup=1)
        for name, (small, text) in _STATES.items()
        for verb, sides, tolerance in (("save", _SAVES, None), ("load", _LOADS, 0.0))
    ),
    Row("checkpoint-pause-1gb", saved, {"forge": background_forge, "dcp": background_dcp},
        "pause of a save of 1 GB in the background; DCP: async_save with a DefaultStager that keeps its buffers"),
]  # fmt: skip

"""Saves and loads beside torch.distributed.checkpoint (DCP) and torch.save, and the machine's own limits.

    python packages/forge-ckpt/benchmarks/checkpoint.py --parameters 100e6 --dir /scratch >> rows.jsonl
    python packages/forge-ckpt/benchmarks/checkpoint.py --small 5000 --dir /scratch >> rows.jsonl
    python packages/forge-ckpt/benchmarks/checkpoint.py --table rows.jsonl    # markdown

One process. The state is ``--parameters`` in fp32 with the two moments of AdamW (12 bytes each), or
``--small`` tensors of up to 1,000 elements. Contenders take turns in each of ``--repeats`` rounds, after
a first one that is not counted; prints one JSON line with medians and (min, max). Every save is durable
when its clock stops: Forge and DCP sync their files, ``torch.save`` gets an fsync; ``os.sync`` runs
before each clock starts. Loads fill existing tensors, from the page cache where the state fits there: the
files are read once before the clock starts, as Forge writes past that cache.
As much free memory as two states is touched before each clock too: the host of a virtual machine may have
taken it back, and whoever is first to use it would pay for that (here 2 to 4 s a GB).

DCP has its best settings here: two writing threads, one file each; ``dcp_stager`` saves asynchronously
with a stager that keeps its buffers, ``dcp`` without. ``blocked`` is the time of the call, ``total`` until
the checkpoint is durable.

The bound of a load is processor time: each byte is read from the page cache into fresh memory, hashed and
copied, on all cores at once. A save copies, hashes and writes each byte; where the disk's own rate (the
better of a plain write and one past the page cache, with fsync, in the same run) is lower, that is its bound.
"""

import argparse
import gc
import json
import mmap
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from forge_ckpt import Store
from forge_ckpt.digests import Digest, digest_function
from forge_ckpt.files import open_direct

Tensors = dict[str, torch.Tensor]
Seconds = dict[str, float]
BLOCK = 4 * 2**20
PIECE = 2**28  # bytes on which the machine's limits are measured
BEST = {"thread_count": 2, "single_file_per_rank": True, "sync_files": True}


def adamw_state(parameters: int) -> Tensors:
    """Parameters of a transformer with fp32 moments; its matrices are those of dim 1024 or 2048."""
    dim = 1024 if parameters < 300e6 else 2048
    shapes: dict[str, tuple[int, ...]] = {"embedding": (32_000, dim)}
    layer, left = 0, parameters - 32_000 * dim
    while left > 0:
        for i, shape in enumerate([(dim, dim)] * 4 + [(4 * dim, dim), (dim, 4 * dim), (dim,)]):
            shapes[f"layers.{layer}.{i}"] = shape
        left -= 12 * dim * dim + dim
        layer += 1
    kinds = ("model", "exp_avg", "exp_avg_sq")
    return {
        f"{kind}.{name}": torch.randn(shape) for kind in kinds for name, shape in shapes.items()
    }


def small_state(count: int) -> Tensors:
    return {f"layers.{i}.w": torch.randn(1 + i * 37 % 1000) for i in range(count)}


class Forge:
    """A store per save, as at the end of a run."""

    def __init__(self, digest: str) -> None:
        self.digest = digest

    def save(self, path: Path, state: Tensors) -> None:
        with Store(path, digest=self.digest) as store:
            store.save(1, {"x": state})

    def load(self, path: Path, state: Tensors) -> None:
        with Store(path, read_only=True) as store:
            store.load({"x": state})


class DCP:
    def save(self, path: Path, state: Tensors) -> None:
        writer = dcp.FileSystemWriter(path, **BEST)
        dcp.save({"x": state}, storage_writer=writer, no_dist=True)

    def load(self, path: Path, state: Tensors) -> None:
        dcp.load({"x": state}, storage_reader=dcp.FileSystemReader(path), no_dist=True)


class TorchSave:
    def save(self, path: Path, state: Tensors) -> None:
        with open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, path: Path, state: Tensors) -> None:
        found = torch.load(path, weights_only=True)
        for name, tensor in state.items():
            tensor.copy_(found[name])


class ForgeAsync:
    """One store for the whole run, so that its staging memory is used again."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "forge_async", keep_last=2**30)
        self.step = 0

    def start(self, path: Path, state: Tensors) -> Callable[[], object]:
        self.step += 1
        self.store.save(self.step, {"x": state}, wait=False)
        return self.store.wait

    def remove(self, path: Path) -> None:
        shutil.rmtree(self.store.path / f"step-{self.step:08d}")


class DCPAsync:
    def __init__(self, stager: DefaultStager | None = None) -> None:
        self.stager = stager

    def start(self, path: Path, state: Tensors) -> Callable[[], object]:
        writer = dcp.FileSystemWriter(path, **BEST)
        made: Any = dcp.async_save({"x": state}, storage_writer=writer, async_stager=self.stager)
        return getattr(made, "upload_completion", made).result

    def remove(self, path: Path) -> None:
        shutil.rmtree(path)


def timed(run: Callable[[], object], size: int) -> float:
    gc.collect()
    os.sync()
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    torch.empty(min(2 * size, free // 2), dtype=torch.uint8).zero_()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def save_and_load(contender: Any, path: Path, state: Tensors) -> Seconds:
    before, size = checksums(state), num_bytes(state)
    seconds = {"save": timed(lambda: contender.save(path, state), size)}
    for tensor in state.values():
        tensor.zero_()
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                while opened.read(BLOCK):
                    pass
    seconds["load"] = timed(lambda: contender.load(path, state), size)
    assert checksums(state) == before, path
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return seconds


def save_in_background(contender: Any, path: Path, state: Tensors) -> Seconds:
    blocked: list[float] = []

    def run() -> None:
        start = time.perf_counter()
        wait = contender.start(path, state)
        blocked.append(time.perf_counter() - start)
        wait()

    total = timed(run, num_bytes(state))
    contender.remove(path)
    return {"blocked": blocked[0], "total": total}


def num_bytes(state: Tensors) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def checksums(state: Tensors) -> list[int]:
    return [int(tensor.view(torch.int32).sum()) for tensor in state.values()]


def limits(folder: Path, digests: Iterable[str]) -> dict[str, float]:
    """GB/s of one thread by processor time, and of the disk by wall clock."""
    path, data = (
        folder / "limits",
        memoryview(mmap.mmap(-1, PIECE)),
    )  # aligned, as direct writes need
    blocks = range(0, PIECE, BLOCK)
    for start in blocks:
        data[start : start + BLOCK] = os.urandom(BLOCK)

    def rate(run: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
        start = clock()
        run()
        return PIECE / 1e9 / max(clock() - start, 1e-9)

    def write(sync: bool) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for start in blocks:
            os.pwrite(fd, data[start : start + BLOCK], start)
        if sync:
            os.fsync(fd)
        os.close(fd)

    def write_direct() -> None:
        path.touch()
        fd = open_direct(path)
        if fd is None:
            write(sync=True)
            return
        with ThreadPoolExecutor(4) as pool:
            for _ in pool.map(lambda at: os.pwrite(fd, data[at : at + BLOCK], at), blocks):
                pass
        os.fsync(fd)
        os.close(fd)

    def read(into: memoryview) -> None:
        fd = os.open(path, os.O_RDONLY)
        for start in blocks:
            os.preadv(fd, [into[start : start + BLOCK]], start)
        os.close(fd)

    def drop() -> None:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    os.sync()
    found = {"disk_write": rate(lambda: write(sync=True), time.perf_counter)}
    drop()
    found["disk_read"] = rate(lambda: read(data), time.perf_counter)
    found["read"] = rate(lambda: read(data))
    # Its pages come with the first touch; malloc might give memory that has been used.
    fresh = mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found["read_fresh"] = rate(lambda: read(memoryview(fresh)))
    source, target = (torch.frombuffer(memory, dtype=torch.uint8) for memory in (data, fresh))
    found["copy"] = rate(lambda: target.copy_(source))
    path.unlink()
    os.sync()
    found["disk_direct"] = rate(write_direct, time.perf_counter)
    path.unlink()
    found["write"] = rate(write_direct)
    path.unlink()
    for name in digests:
        found[name] = rate(partial(hash_blocks, digest_function(name), data))
    return found


def hash_blocks(digest_of: Digest, data: memoryview) -> None:
    for start in range(0, len(data), BLOCK):
        digest_of(data[start : start + BLOCK])


def bounds(rates: dict[str, float], digests: Iterable[str], cores: int) -> dict[str, float]:
    """GB/s that a load and a save can have at most with each digest."""
    found = {}
    for name in digests:
        load = sum(1 / rates[part] for part in ("read_fresh", name, "copy"))
        save = sum(1 / rates[part] for part in ("copy", name, "write"))
        found[f"load_{name}"] = cores / load
        found[f"save_{name}"] = min(cores / save, max(rates["disk_write"], rates["disk_direct"]))
    return found


def spread(values: list[float]) -> list[float]:
    return [round(f(values), 4) for f in (statistics.median, min, max)]


def measure(state: Tensors, folder: Path, repeats: int, skip: list[str]) -> dict[str, Any]:
    digests = ["sha256"]
    with suppress(ValueError):
        digest_function("blake3")
        digests.append("blake3")
    contenders: dict[str, Any] = {f"forge_{name}": Forge(name) for name in digests}
    contenders |= {"dcp": DCP(), "torch": TorchSave(), "forge_async": ForgeAsync(folder)}
    # without pinned memory, which a machine without CUDA does not have
    stager = DefaultStager(StagingOptions(False, False, False, False))
    contenders |= {"dcp_async": DCPAsync(), "dcp_stager": DCPAsync(stager)}
    contenders = {name: made for name, made in contenders.items() if name not in skip}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    rates: dict[str, list[float]] = {}
    for number in range(repeats + 1):
        names = list(contenders)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:  # nobody is always first
            made, path = contenders[name], folder / f"{name}-{number}"
            run = save_in_background if hasattr(made, "start") else save_and_load
            for what, value in run(made, path, state).items():
                seconds[name].setdefault(what, []).append(value)
        for name, value in limits(folder, digests).items():
            rates.setdefault(name, []).append(value)
    if "forge_async" in contenders:
        contenders["forge_async"].store.close()
    cores, size = os.cpu_count() or 1, num_bytes(state)
    medians = {name: statistics.median(values[1:]) for name, values in rates.items()}
    found = bounds(medians, digests, cores)
    fractions = {}
    for key, bound in found.items():
        what, digest = key.split("_")
        took = seconds.get(f"forge_{digest}", {}).get(what)
        if took and size > 1e8:  # what a small state takes does not depend on its bytes
            fractions[key] = round(size / 1e9 / statistics.median(took[1:]) / bound, 3)
    return {
        "bytes": size,
        "tensors": len(state),
        "seconds": {
            name: {what: spread(values[1:]) for what, values in row.items()}
            for name, row in seconds.items()
        },
        "first_seconds": {
            name: {what: round(values[0], 4) for what, values in row.items()}
            for name, row in seconds.items()
        },
        "limits_gb_per_s": {name: spread(values[1:]) for name, values in rates.items()},
        "bounds_gb_per_s": {name: round(value, 3) for name, value in found.items()},
        "fraction_of_bound": fractions,
    }


COLUMNS = {
    "forge_sha256": "Forge, sha256",
    "forge_blake3": "Forge, blake3",
    "dcp": "DCP",
    "torch": "`torch.save`",
    "forge_async": "Forge, `wait=False`",
    "dcp_async": "`dcp.async_save`",
    "dcp_stager": "the same with `DefaultStager`",
}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: saves and loads in GB/s (small states in seconds), as medians with (min-max)."""
    lines = ["| | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        large, bytes_ = row["bytes"] > 1e8, row["bytes"] / 1e9
        for what in ("save", "load", "blocked", "total"):
            cells = []
            for name in COLUMNS:
                values = row["seconds"].get(name, {}).get(what)
                if values is None:
                    cells.append("")
                    continue
                in_seconds = what in ("blocked", "total") or not large
                shown = values if in_seconds else [bytes_ / values[i] for i in (0, 2, 1)]
                share = row["fraction_of_bound"].get(f"{what}_{name.removeprefix('forge_')}")
                of_bound = "" if share is None else f", {share:.2f} of its bound"
                cells.append("{:.2f} ({:.2f}-{:.2f})".format(*shown) + of_bound)
            unit = "GB/s" if large and what in ("save", "load") else "s"
            title = {"blocked": "async, blocked", "total": "async, total"}.get(what, what)
            if any(cells):
                lines.append(f"| {row['state']}: {title}, {unit} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--small", type=int, help="this many small tensors instead")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--skip", nargs="*", default=[], help="contenders, such as dcp_stager")
    parser.add_argument("--table", type=Path, help="print the rows of this file as markdown")
    args = parser.parse_args()
    if args.table is not None:
        print(table([json.loads(line) for line in args.table.read_text().splitlines()]))
        return
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    parameters = int(args.parameters)
    state = adamw_state(parameters) if args.small is None else small_state(args.small)
    title = (
        f"{parameters / 1e6:.0f}M parameters, AdamW"
        if args.small is None
        else f"{args.small:,} small tensors"
    )
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    # dcp.async_save needs a process group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        row = measure(state, folder, args.repeats, args.skip)
    finally:
        shutil.rmtree(folder)
    where = {"torch": torch.__version__, "cpus": os.cpu_count(), "machine": platform.machine()}
    print(json.dumps({"benchmark": "checkpoint", "state": title, **row, **where}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

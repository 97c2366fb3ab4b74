"""Exponents of time and memory in the sizes that users raise: `hatch run bench --growth`.

Each size runs in a process of its own: a step at the smallest size, which loads what the first step loads, then the measured ones.
The exponent is that of a least-squares line through log(size) and log(seconds), or bytes at the peak beyond those before the
step. A fixed cost lowers it. Over 1.1 it is superlinear, and the page gives the reason.
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks import harness
from benchmarks.rows import Setting

SUPERLINEAR = 1.1
LEAST_BYTES = 2**21  # below, the allocator's rounding is most of the figure
Step = Callable[[], object]


@dataclass(frozen=True)
class Growth:
    """What grows: `make(setting, size)` returns a step; `reason` is why it may be superlinear."""

    sizes: tuple[int, ...]
    make: Callable[[Setting, int], Step]
    text: str
    reason: str = ""


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Exponent p of values ~ sizes^p by least squares in logarithms."""
    x, y = ([math.log(v) for v in found] for found in (sizes, values))
    middle_x, middle_y = statistics.fmean(x), statistics.fmean(y)
    above = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y))
    return above / sum((a - middle_x) ** 2 for a in x)


# ---- steps


def model_step(dim: int, layers: int, batch: int, seq_len: int, documents: int = 1) -> Step:
    """Forward, loss and backward of a dense model on sequences with documents of equal length."""
    from forge_core import Transformer, TransformerConfig, cross_entropy

    config = TransformerConfig(
        vocab_size=2048, dim=dim, num_layers=layers, num_heads=2, max_seq_len=seq_len
    )
    model = Transformer(config)
    tokens = torch.randint(0, 2048, (batch, seq_len))
    ids = (torch.arange(seq_len) * documents // seq_len).expand(batch, -1).contiguous()

    def step() -> None:
        model.zero_grad()
        logits = model(tokens, None, ids if documents > 1 else None)
        cross_entropy(logits, tokens).mean.backward()

    return step


#: (dim, layers) by parameters without embeddings, in thousands.
SHAPES = {98: (64, 2), 786: (128, 4), 6_291: (256, 8), 25_166: (512, 8)}


def parameters(setting: Setting, size: int) -> Step:
    return model_step(*SHAPES[size], batch=4, seq_len=128)


def sequence(setting: Setting, size: int) -> Step:
    return model_step(128, 4, 1, size)


def documents(setting: Setting, size: int) -> Step:
    return model_step(128, 4, 2, 2048, size)


def experts(setting: Setting, size: int) -> Step:
    from forge_moe import MoE, MoEConfig

    layer = MoE(MoEConfig(dim=128, hidden_dim=128, num_experts=size, top_k=2))
    torch.nn.init.normal_(layer.router.weight)
    x = torch.randn(1, 4096, 128, requires_grad=True)
    return lambda: layer(x).sum().backward()


def ranks(setting: Setting, size: int) -> Step:
    """Meshes, sharding and initial weights of rank 0; the group sends nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from forge_core import Transformer, TransformerConfig, initialize
    from forge_parallel import ParallelConfig, make_meshes, parallelize

    def step() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        with torch.device("meta"):
            model = Transformer(
                TransformerConfig(vocab_size=2048, dim=256, num_layers=8, num_heads=4)
            )
        config = ParallelConfig(device="cpu", precision="fp32")
        initialize(parallelize(model, config, make_meshes(config)), seed=0)

    return step


def files(setting: Setting, size: int) -> Step:
    """Prepare `size` text files of 8 kB."""
    import shutil

    from forge_data.prepare import prepare

    folder, out = setting.folder / f"texts-{size}", setting.folder / "prepared"
    folder.mkdir()
    for i in range(size):
        (folder / f"{i}.txt").write_text(f"file {i} " * 1000)

    def step() -> None:
        shutil.rmtree(out, ignore_errors=True)
        prepare(folder, out)

    return step


def checkpoints(setting: Setting, size: int) -> Step:
    """Open a folder of `size` checkpoints, load the newest and save one, which removes the oldest."""
    from forge_ckpt import Store

    path, state = setting.folder / f"store-{size}", {"x": {"w": torch.randn(1000)}}
    with Store(path, keep_last=size) as store:
        for i in range(size):
            store.save(i, state)

    def step() -> None:
        with Store(path, keep_last=size) as store:
            store.save((store.load(state) or 0) + 1, state)

    return step


def log_rows(setting: Setting, size: int, columns: int = 16) -> Step:
    """Read the metrics of a run with `size` rows."""
    from forge_train import read_rows

    path = setting.folder / f"rows-{size}-{columns}.jsonl"
    with path.open("w") as file:
        for i in range(size):
            row = {"schema": 1, "step": i, **{f"column_{c}": i + c / 7 for c in range(columns)}}
            file.write(json.dumps(row) + "\n")
    return lambda: len(list(read_rows(path))) and None


def log_columns(setting: Setting, size: int) -> Step:
    return log_rows(setting, 1000, size)


_QUADRATIC = "attention computes half of S x S scores for each head"
GROWTHS = {
    "parameters": Growth(tuple(SHAPES), parameters, "thousand parameters in blocks; training step on 512 tokens"),
    "sequence": Growth((256, 1024, 4096, 8192), sequence, "tokens of one document; training step", _QUADRATIC),
    "documents": Growth((4, 16, 64, 256), documents, "documents in a packed sequence of 2,048; training step"),
    "experts": Growth((4, 16, 64, 128), experts, "experts at equal FLOPs; forward and backward of 4,096 tokens"),
    "ranks": Growth((4, 16, 64, 256), ranks, "ranks of a fake process group; meshes, sharding, weights of one rank"),
    "files": Growth((8, 32, 128, 512), files, "text files of 8 kB; prepare"),
    "checkpoints": Growth((4, 16, 64, 128), checkpoints, "checkpoints kept; open, load, save"),
    "log-rows": Growth((1000, 4000, 16_000, 32_000), log_rows, "rows of metrics with 16 columns; read"),
    "columns": Growth((8, 32, 128, 256), log_columns, "columns of 1,000 rows of metrics; read"),
}  # fmt: skip


# ---- measuring


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def grow(name: str, size: int) -> dict[str, float]:
    """Median seconds of a step at this size, and its peak of bytes."""
    growth, setting = GROWTHS[name], Setting("full")
    with setting.stack:
        growth.make(setting, growth.sizes[0])() if size != growth.sizes[0] else None
        step = growth.make(setting, size)
        if size == growth.sizes[0]:
            step()

        # What the first step freed would be used again, and its bytes would be missing from the figure.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, seconds = resident("VmRSS"), []
        for _ in range(5):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return {"seconds": statistics.median(seconds), "bytes": resident("VmHWM") - before}


def line_of(name: str) -> dict[str, Any]:
    """Measure all sizes of one growth; the content of its line."""
    growth, found = GROWTHS[name], []
    for size in growth.sizes:
        command = [sys.executable, "-m", "benchmarks.suite", "--grow", name, str(size)]
        done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True)
        if done.returncode:
            return {"growth": name, "error": done.stderr[-500:]}
        found.append(json.loads(done.stdout.splitlines()[-1]))
    exponents: dict[str, float | None] = {
        "time": exponent(growth.sizes, [f["seconds"] for f in found])
    }
    large = [
        (size, f["bytes"]) for size, f in zip(growth.sizes, found) if f["bytes"] >= LEAST_BYTES
    ]
    exponents["memory"] = exponent(*zip(*large)) if len(large) > 2 else None
    over = [key for key, value in exponents.items() if value is not None and value > SUPERLINEAR]
    reason = growth.reason or "no reason is known" if over else ""
    sizes = {str(size): f for size, f in zip(growth.sizes, found)}
    about = {"text": growth.text, "superlinear": over, "reason": reason}
    return {"growth": name, **about, "sizes": sizes, "exponents": exponents}


def main(args: argparse.Namespace) -> int:
    """Add a line for each growth to --out; exit code 1 if one failed or is superlinear without a reason."""
    if args.grow:
        torch.set_num_threads(args.threads or 1)  # of two threads the wait is measured too
        print(json.dumps(grow(args.grow[0], int(args.grow[1]))))
        return 0
    code = 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        for name in (name for name in GROWTHS if fnmatch.fnmatch(name, args.rows)):
            line = line_of(name)
            print(json.dumps(harness.rounded(line)), file=file, flush=True)
            shown = (
                line.get("error") or f"{line['exponents']} {line['superlinear']} {line['reason']}"
            )
            print(f"{name:12} {shown}", flush=True)
            code |= "error" in line or line["reason"] == "no reason is known"
    return int(code)

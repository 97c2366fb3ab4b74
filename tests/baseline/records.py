"""Five jobs, what they trained when the records were made, and whether code of today trains the same.

    python -m tests.baseline.records compare                # today's code against the records
    python -m tests.baseline.records compare --against REV  # against the code of a revision, on this machine
    python -m tests.baseline.records record                 # make the records anew

A record holds all rows but their columns of time and memory, the final weights, and the run as it was at step 15, from
which today's code must go on to the same rows and weights. Everything is compared bit for bit with code of a revision, and
with the records where torch, Python, the CPU and the number of threads are theirs, else within bounds of rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from forge_ckpt import read_tensors

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RECORDS = HERE / "records"
JOBS = ("debug", "moe_debug", "vlm_debug", "lora", "mixture")
STEPS, MIDDLE = 30, 15
#: Error on another CPU, of the largest value: measured 2e-5, and 1.4e-3 of small gradient norms of adapters.
BOUND, BOUNDS = 1e-4, {"lora": 1e-2}
#: Columns of time and memory.
MEASURED = frozenset(
    {"tokens_per_second", "mfu", "data_wait_seconds", "memory_bytes", "seconds", "device_hours", "seconds_left"}
)  # fmt: skip


def job_file(name: str) -> Path:
    return HERE / "jobs" / f"{name}.toml"


def train(name: str, run: Path, tree: Path = ROOT) -> None:
    """Train a job, or go on with it, with the sources of a tree."""
    sources = [*tree.glob("packages/*/src"), *tree.glob("apps/*/src")]
    path = os.pathsep.join(map(str, sources))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    job = str(job_file(name).relative_to(ROOT))
    command = [
        sys.executable,
        "-m",
        "forge_train",
        "run",
        job,
        f"--run.dir={os.path.relpath(run, ROOT)}",
    ]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def conditions() -> dict[str, Any]:
    """What the bits of a result depend on beside the code."""
    return {
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "cpu": _cpu(),
        "threads": 1,
    }


def _cpu() -> str:
    """A digest of what libraries choose their kernels by."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    names = ("vendor_id", "cpu family", "model", "stepping", "cache size", "flags")
    facts = [line for line in lines if line.partition(":")[0].strip() in names]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def rows_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in MEASURED} for line in lines]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the last checkpoint, and averages of them."""
    tensors = read_tensors(run / "checkpoints" / f"step-{STEPS:08d}")
    return {k: v for k, v in dict(tensors).items() if not k.startswith(("optimizer.", "rng."))}


def saved_run(name: str, folder: Path) -> Path:
    """A copy of the recorded run as it was at step 15."""
    return shutil.copytree(RECORDS / name / "run", folder / name)


def differences(
    found: tuple[list[dict[str, Any]], dict[str, torch.Tensor]],
    wanted: tuple[list[dict[str, Any]], dict[str, torch.Tensor]],
    bound: float,
) -> Iterator[str]:
    """A line for each column of a step, and each tensor, that differs by more than the bound."""
    (rows, weights), (wanted_rows, wanted_weights) = found, wanted
    if [row["step"] for row in rows] != [row["step"] for row in wanted_rows]:
        yield f"steps {[row['step'] for row in rows]}"
        return
    for row, other in zip(rows, wanted_rows):
        for key in row.keys() | other.keys():
            if not _same(row.get(key, ...), other.get(key, ...), bound):
                yield f"step {row['step']}: {key} {other.get(key)} -> {row.get(key)}"
    for key in weights.keys() | wanted_weights.keys():
        if key not in weights or key not in wanted_weights:
            yield f"weights: {key} in one alone"
        elif not _same_tensor(weights[key], wanted_weights[key], bound):
            yield f"weights: {key}"


def _same(value: Any, other: Any, bound: float) -> bool:
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(_same(a, b, bound) for a, b in zip(value, other))
    if bound and isinstance(value, float) and isinstance(other, float):
        return abs(value - other) <= bound * max(abs(other), 1e-5)
    return bool(value == other)


def _same_tensor(value: torch.Tensor, other: torch.Tensor, bound: float) -> bool:
    if not bound or not value.is_floating_point():
        return torch.equal(value, other)
    return bool((value - other).abs().max() <= bound * other.abs().max())


def recorded(name: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    lines = (RECORDS / name / "rows.jsonl").read_text().splitlines()
    with numpy.load(RECORDS / name / "weights.npz") as file:
        weights = {key: torch.from_numpy(file[key]) for key in file.files}
    return [json.loads(line) for line in lines], weights


def bound_here(name: str) -> float:
    """0 where this machine must give the bits of a job's record."""
    made = json.loads((RECORDS / "conditions.json").read_text())
    return 0.0 if made == conditions() else BOUNDS.get(name, BOUND)


def record(folder: Path) -> None:
    """Train the jobs with the code of this tree, and write the records."""
    shutil.rmtree(RECORDS, ignore_errors=True)
    for name in JOBS:
        run, kept = folder / name, RECORDS / name
        train(name, run)
        (kept / "run/checkpoints").mkdir(parents=True)
        step = f"checkpoints/step-{MIDDLE:08d}"
        shutil.copytree(run / step, kept / "run" / step)
        if (run / "base").exists():
            shutil.copytree(run / "base", kept / "run/base")
        for file in ("config.toml", "metrics.jsonl"):
            shutil.copy(run / file, kept / "run" / file)
        (kept / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(run)))
        weights = {key: value.numpy() for key, value in weights_of(run).items()}
        numpy.savez_compressed(kept / "weights.npz", **weights)
    (RECORDS / "conditions.json").write_text(json.dumps(conditions(), indent=1) + "\n")


def compare(folder: Path, against: str | None) -> list[str]:
    """Train the jobs, and go on with the recorded runs; a line for each difference."""
    lines = []
    tree = _worktree(folder, against) if against else None
    for name, kind in itertools.product(JOBS, ("new", "resumed")):
        run, old = (folder / code / kind / name for code in ("now", "then"))
        if kind == "resumed":
            saved_run(name, run.parent), saved_run(name, old.parent)
        train(name, run)
        wanted, bound = recorded(name), bound_here(name)
        if tree is not None:
            train(name, old, tree)
            wanted, bound = (rows_of(old), weights_of(old)), 0.0
        found = list(differences((rows_of(run), weights_of(run)), wanted, bound))
        print(f"{name}: {kind} run {'differs' if found else 'is equal'}", flush=True)
        lines += [f"{name}, {kind} run: {line}" for line in found]
    if tree is not None:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    return lines


def _worktree(folder: Path, revision: str) -> Path:
    tree = folder / "tree"
    command = ["git", "worktree", "add", "--quiet", "--detach", str(tree), revision]
    subprocess.run(command, cwd=ROOT, check=True)
    return tree


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.baseline.records", description=__doc__)
    parser.add_argument("verb", choices=["record", "compare"])
    parser.add_argument("--against", help="a revision of git, which is trained on this machine")
    arguments = parser.parse_args()
    (ROOT / "runs").mkdir(exist_ok=True)  # below it, so that a record names no path of this machine
    with tempfile.TemporaryDirectory(prefix="baseline-", dir=ROOT / "runs") as name:
        folder = Path(name)
        if arguments.verb == "record":
            record(folder)
            return 0
        found = compare(folder, arguments.against)
    print("\n".join(found[:50]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""The planner's memory against the allocator's peak: `hatch run null-gpu memory [--only WORDS] [--write]`.

The allocator is torch's own, of its CUDA build; the device computes nothing. Each job is run for three steps by the runner
and planned by `forge-train plan`. `--write` keeps the peaks in docs/data/null-gpu-memory.json and makes docs/null-gpu-memory.md;
without it nothing is written. Leaves with 1 for a job that fails, whose plan is too far from its peak, or whose peak is
2 % above the kept one.
tests/parallel/test_plan_memory.py plans all kept rows again, on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.null_gpu import device
from tests.null_gpu.memory_rows import (
    CONFIGS,
    JOBS,
    LAYOUTS,
    MANY,
    ONE,
    ONE_GPU,
    PRESETS,
    ROOT,
    Job,
)

from forge_data.prepare import prepare
from forge_train import load_job
from forge_train.plan import price

KEPT = ROOT / "docs/data/null-gpu-memory.json"
PAGE = ROOT / "docs/null-gpu-memory.md"
#: Larger copies to and from the device are left out: their content is nowhere read.
_SKIPPED = 2**20


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="memory", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="jobs named so; may be repeated")
    parser.add_argument("--missing", action="store_true", help="jobs that no row is kept of")
    parser.add_argument("--write", action="store_true", help=f"keep the result in {KEPT.name}")
    args = parser.parse_args(argv)
    known, reds = rows(), 0
    jobs = [
        job
        for job in JOBS
        if any(words in job.name for words in args.only or [""])
        and not (args.missing and job.name in known)
    ]
    for job, row in measured(jobs):
        if "error" in row:
            print(f"{job.name}: RED\n{row['error']}", flush=True)
            reds += 1
            continue
        planned = plan(job)
        kept_peak = known.get(job.name, row)["peak"]
        red = not is_near(planned / row["peak"], job) or rises(row["peak"], kept_peak)
        reds += red
        print(f"{job.name}: planned {planned / 1e9:.2f}, peak {row['peak'] / 1e9:.2f} GB, "
              f"{planned / row['peak']:.3f}; kept {kept_peak / 1e9:.2f}{' RED' if red else ''}", flush=True)  # fmt: skip
        if args.write:
            kept = ordered(rows() | {job.name: row})
            KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if args.write:
        PAGE.write_text(page(ordered(rows())), encoding="utf-8")
    return int(reds > 0)


def measured(jobs: Sequence[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Each job with its result by tests/null_gpu/peak.py, as they end."""
    variables = device.environment(devices=8, skip_copies_above=_SKIPPED)
    with tempfile.TemporaryDirectory() as folder:
        make_tokens(Path(folder))
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peak.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        for job in jobs:
            asked = {
                "config": str(CONFIGS / job.config),
                "flags": job.all_flags,
                "ranks": job.ranks,
                "saves": job.saves,
            }
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            yield job, json.loads(process.stdout.readline())
        process.stdin.close()
        process.wait()


def rows() -> dict[str, dict[str, Any]]:
    """The kept measurements by the names of their jobs: peak and reserved bytes of the fullest rank, torch's version."""
    found: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return found


def ordered(kept: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """In the order of the jobs, without those that are gone."""
    return {job.name: kept[job.name] for job in JOBS if job.name in kept}


def plan(job: Job) -> float:
    """Bytes that the planner expects on the fullest rank. Needs no GPU."""
    config = load_job(CONFIGS / job.config, job.all_flags, with_data=False).config
    return price(config, "h200", job.ranks).peak


def is_near(share: float, job: Job) -> bool:
    """Whether a plan's share of the peak is right: above by no more than the job allows, below by 2 %, as a run must not
    end without memory."""
    return 0.98 <= share <= 1 + job.within


def rises(peak: int, kept: int) -> bool:
    """Whether a peak is more than 2 % above the kept one."""
    return peak > 1.02 * kept


def make_tokens(folder: Path) -> None:
    """`data/tokens`, as recipes name it: documents of 12,000 bytes, a third of them for validation."""
    text = folder / "text.txt"
    lines = (f"document {i} " + f"{i * i % 997} " * 3000 for i in range(300))
    text.write_text("\n".join(lines), encoding="utf-8")
    prepare(text, folder / "data" / "tokens", document="line", validation_every=3)


def page(kept: dict[str, dict[str, Any]]) -> str:
    """The page of kept measurements, beside what the planner says now."""
    parts = [
        _HEAD.format(
            one=f"{ONE:.0%}",
            many=f"{MANY:.0%}",
            torch=sorted({r["torch"] for r in kept.values()})[-1],
        )
    ]
    for title, jobs in (
        ("Presets of one GPU", PRESETS),
        ("One GPU", ONE_GPU),
        ("Several", LAYOUTS),
    ):
        parts.append(f"## {title}\n\n" + _table(jobs, kept))
    return "\n\n".join(parts) + "\n"


def _table(jobs: Iterable[Job], kept: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| job | planned, GB | peak, GB | planned / peak | reserved, GB |",
        "|---|---|---|---|---|",
    ]
    for job in (job for job in jobs if job.name in kept):
        row, planned = kept[job.name], plan(job)
        sizes = (planned, row["peak"], row["reserved"])
        said, peak, reserved = (f"{size / 1e9:.2f}" for size in sizes)
        lines.append(f"| {job.name} | {said} | {peak} | {planned / row['peak']:.3f} | {reserved} |")
    return "\n".join(lines)


_HEAD = """# Memory: planned and measured

`forge-train plan` against the peak of torch's own caching allocator (torch {torch}), in two steps and an evaluation
of each job by the runner, on a GPU that computes nothing (an H200 by its name). The allocator, autograd, FSDP2 and the
compiler are those of a GPU; the memory of a CUDA context and of NCCL's buffers is in neither number. Reserved is
what the allocator holds for it, with gaps.

A preset of one GPU must be planned within {one}; so must the other jobs on one GPU, and adapters and layouts of several
within {many}, on their fullest rank; no plan may be more than 2% below its peak. Rows are made by `hatch run null-gpu memory --write`
(tests/null_gpu/memory_rows.py has flags); a test plans each of them again.

Two peaks rose since November 27, 2026. A fused loss holds a block of logits, 0.5 GB in bf16, and 1 GB of fp32 rows of it, so
that a GPU runs fewer kernels ("1b fused loss, micro_batch 4", from 43.28 GB). One process in bf16 without FSDP2 casts all
gradients after the backward of all blocks ("moe_64 8 layers, recompute full", from 91.69 GB)."""

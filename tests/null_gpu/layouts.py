"""Runs every job on null GPUs, and keeps the table of their host waits, kernels and collectives.

    hatch run null-gpu layouts                    # all; compared with docs/data/null-gpu-layouts.json
    hatch run null-gpu layouts --only "tp 2"      # that one
    hatch run null-gpu layouts --resume           # those that were not measured since the last commit
    hatch run null-gpu layouts --new --write      # those that the table lacks
    hatch run null-gpu layouts --write            # the table and its page follow, where they shrink

A job is `forge-train run` with saves, evaluations and a sample, once more from its newest checkpoint, and `forge-train
generate`. It is red if one of them fails, if it waits for the device where the table has no such wait, or if a step has more
kernels or collectives than the table: to allow them, remove its row from the table, and write it again. Leaves with 1 if a job is red.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from queue import Queue
from typing import Any

from tests.null_gpu.jobs import EVERY, JOBS, MORE_STEPS, STEADY, STEPS, Job, write_data
from tests.null_gpu.ranks import ROOT, Ended, NullRanks
from tests.null_gpu.waits import fewer, page, problems

from forge_testing.commits import short_commit

TABLE = ROOT / "docs/data/null-gpu-layouts.json"
PAGE = ROOT / "docs/null-gpu-layouts.md"
#: What the figures depend on; changes elsewhere do not make a commit another one.
SOURCES = ("packages", "apps/train/src", "tests/null_gpu", "tests/harness/src")
Rows = dict[str, dict[str, Any]]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="hatch run null-gpu layouts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=JOBS, metavar="NAME", help="this job; may be repeated")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="keep what was measured of this commit")  # fmt: skip
    parser.add_argument("--new", action="store_true", help="only jobs that lack one")
    parser.add_argument("--write", action="store_true", help="new rows, and those that are not red")
    parser.add_argument("--lanes", type=int, default=2, help="jobs at once")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/null-gpu", help="of the runs")
    args = parser.parse_args(argv)
    kept, commit = _read(TABLE), short_commit(ROOT, SOURCES)
    measured = _read(args.folder / "measured.json") if args.resume else {}
    measured = {name: row for name, row in measured.items() if row["commit"] == commit}
    known = measured | (kept if args.new else {})
    wanted = [name for name in args.only or JOBS if name not in known]
    reds = 0
    for number, (row, wrong, seconds) in enumerate(_measured(wanted, args.folder, args.lanes), 1):
        name = row["layout"]
        row |= {"commit": commit, "torch": version("torch")}
        wrong = wrong or list(problems(row, kept.get(name), JOBS[name].reason))
        told = wrong or (fewer(row, kept[name]) if name in kept else [])
        print(f"{number}/{len(wanted)} {name}: {'RED' if wrong else 'ok'}, {seconds:.0f} s")
        print("".join(f"    {line}\n" for line in told), end="", flush=True)
        reds += bool(wrong)
        if not wrong:
            measured[name] = row
            _write(args.folder / "measured.json", measured)
    if args.write:
        _write(TABLE, kept | measured)
        PAGE.write_text(page(_read(TABLE).values(), {n: j.reason for n, j in JOBS.items()}))  # fmt: skip
    print(f"{len(wanted) - reds} of {len(wanted)} layouts are as they should be")
    return int(bool(reds))


def _measured(
    names: Sequence[str], folder: Path, lanes: int
) -> Iterator[tuple[dict[str, Any], list[str], float]]:
    """What `measure` gives for each of the jobs, and its seconds, in the order in which they end."""
    free: Queue[NullRanks] = Queue()

    def one(name: str) -> tuple[dict[str, Any], list[str], float]:
        started, ranks = time.monotonic(), free.get()
        try:
            found = measure(name, JOBS[name], ranks, folder / name.replace(" ", "-"))
        finally:
            free.put(ranks)
        return *found, time.monotonic() - started

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(lanes) as pool:
        for _ in range(lanes):
            ranks = NullRanks(folder / "caches")
            stack.callback(ranks.close)
            free.put(ranks)
        for future in as_completed([pool.submit(one, name) for name in names]):
            yield future.result()


def measure(
    name: str, job: Job, ranks: NullRanks, folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """Train, go on and generate in `folder`: the row of the job, and what went wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(job.toml())
    if job.pictures:
        write_data(folder)
    run = ["run", "job.toml"]
    first = ranks.run(run, folder=folder, ranks=job.ranks)
    wrong = _failures("run", first) or _missing(first, job)
    row: dict[str, Any] = {"layout": name, "ranks": job.ranks}
    if wrong:
        return row, wrong
    row |= _figures(first)
    again = ranks.run([*run, "--train.steps", str(MORE_STEPS)], folder=folder, ranks=job.ranks)
    wrong = _failures("resume", again) or _not_resumed(again)
    if not wrong and job.generates:
        words = ["generate", "run", "--prompt", "The ", "--max-new-tokens", "2"]
        wrong = _failures("generate", ranks.run(words, folder=folder))
    if not wrong:
        shutil.rmtree(folder)
    return row, wrong


def _failures(name: str, ended: Ended) -> list[str]:
    """A line for each rank that failed, with the end of what it printed."""
    return [
        f"{name}: rank {rank} ended with {code}: " + " | ".join(text.strip().splitlines()[-8:])
        for rank, (code, text) in enumerate(zip(ended.codes, ended.texts, strict=True))
        if code != 0
    ]


def _missing(ended: Ended, job: Job) -> list[str]:
    """Steps, kernels and collectives that a rank did not have."""
    found = []
    for rank, record in enumerate(ended.records):
        steps = record["steps"]
        if [int(step) for step in steps] != list(range(1, STEPS + 1)):
            found.append(f"rank {rank} trained steps {', '.join(steps)}, not 1 to {STEPS}")
        elif not all(_kernels(counts) for counts in steps.values()):
            found.append(f"rank {rank} has a step without a kernel")
        elif job.ranks > 1 and not all(_collectives(counts) for counts in steps.values()):
            found.append(f"rank {rank} has a step without a collective")
    return found


def _not_resumed(ended: Ended) -> list[str]:
    wanted = [str(step) for step in range(STEPS + 1, MORE_STEPS + 1)]
    return [
        f"resume: rank {rank} trained steps {', '.join(record['steps'])}, not {', '.join(wanted)}"
        for rank, record in enumerate(ended.records)
        if list(record["steps"]) != wanted
    ]


def _figures(ended: Ended) -> dict[str, Any]:
    """Kernels and collectives of a steady step of rank 0; waits by phase, of each function where there are most."""
    waits: dict[str, Counter[str]] = {}
    for record in ended.records:
        for phase, found in waits_of_rank(record).items():
            waits[phase] = waits.get(phase, Counter()) | found  # the larger of both
    counts = ended.records[0]["steps"][str(STEADY[-1])]
    return {
        "kernels": _kernels(counts),
        "collectives": _collectives(counts),
        "waits": {phase: dict(sorted(found.items())) for phase, found in sorted(waits.items())},
    }


def waits_of_rank(record: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """Of one rank: those of a steady step, of the first row and save, and of the last evaluation, as kernels are compiled in the first.

    The row of a step is read in the next one.
    """
    found: dict[str, Counter[str]] = {}
    for phase, step, function, times in record["waits"]:
        steps = {"step": STEADY, "evaluation": (STEPS,)}.get(phase, (EVERY, EVERY + 1))
        if step in steps:
            table = found.setdefault(phase, Counter())
            before = table[function]
            table[function] = max(before, times) if phase == "step" else before + times
    return found


def _kernels(counts: Mapping[str, int]) -> int:
    return sum(counts.get(kind, 0) for kind in ("launch", "launch.triton", "blas"))


def _collectives(counts: Mapping[str, int]) -> dict[str, int]:
    return {
        kind.removeprefix("nccl."): n
        for kind, n in counts.items()
        if kind.startswith("nccl.") and not kind.endswith(".bytes")
    }


def _write(path: Path, rows: Rows) -> None:
    """One row a line, so that a change of one layout is a change of one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(rows[name]) for name in JOBS if name in rows]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def _read(path: Path) -> Rows:
    rows: Iterable[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return {row["layout"]: row for row in rows}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

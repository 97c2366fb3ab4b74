"""Faults on runs of forge-train, one after another, each followed by all invariants; resumable.

    hatch run chaos --campaign                 # the whole plan, into runs/chaos.jsonl and docs/reliability.*
    hatch run chaos --faults 20                # a smoke
    hatch run chaos --suite files --faults 200 --seed 3

A suite has a schedule that the seed determines. Its faults strike jobs of 12; a job is run to its end and compared
with the undisturbed run. Each fault is one line of JSON when it has struck; a campaign that ended goes on where
it stopped. Leaves with 1 if a fault failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.slurm.cluster import why_not

from forge_resilience.chaos import Fault, Injection, make_schedule
from forge_testing.commits import short_commit

from . import plants
from .invariants import Reference
from .job import Failed, Job
from .lives import prepare
from .suites import SUITES, Suite

ROOT = Path(__file__).resolve().parents[2]
PLAN = {"wait": 525, "async": 525, "files": 1020, "points": 360, "disk": 300, "odd": 300, "world": 120, "tensor": 60, "context": 60, "pipeline": 60, "experts": 60, "layouts": 60, "numerics": 96, "supervised": 180, "torchrun": 105, "srun": 120}  # fmt: skip
_FAULTS_A_JOB = 12
_TURN = 3 * _FAULTS_A_JOB
_TRIES = 6
_SOURCES = ("packages", "apps/train/src", "tests/chaos")


def make_reference(folder: Path, numbers: Sequence[str]) -> Reference:
    job = Job(Suite("reference", {}), folder, None)  # type: ignore[arg-type]
    keys = {"every_steps": "1", "keep_last": "1000", "wait": "true"}
    flags = [text for key, value in keys.items() for text in (f"--checkpoint.{key}", value)]
    job.suite = Suite("reference", {}, tuple(flags), numbers=tuple(numbers))
    job.start()
    if job.end(180) != 0:
        raise SystemExit(job.output())
    return Reference(job.run)


def jobs(suite: Suite, faults: Sequence[Fault]) -> Iterator[list[Fault]]:
    """Dozens, those of the phase `exit` last."""
    for first in range(0, len(faults), _FAULTS_A_JOB):
        yield sorted(faults[first : first + _FAULTS_A_JOB], key=lambda fault: fault.phase == "exit")


def run_suite(
    suite: Suite, faults: Sequence[Fault], folder: Path, reference: Reference
) -> Iterator[dict[str, Any]]:
    """Rows of faults that struck, failed ones included, after each job. A fault that misses is tried again."""
    number = 0
    for dozen in jobs(suite, faults):
        queue = [(fault, 0) for fault in dozen]
        while queue:
            number += 1
            job = Job(suite, folder / f"{suite.name}-{number}", reference)
            failed = run_job(job, queue)
            yield from job.rows
            if not failed:
                shutil.rmtree(job.folder, ignore_errors=True)


def run_job(job: Job, queue: list[tuple[Fault, int]]) -> bool:
    """Strike a job with the faults of a queue until it is done, and run it to its end; whether it failed."""
    fault, tries, row = queue[0][0], 0, None
    try:
        while queue and not job.done:
            (fault, tries), row, began = queue.pop(0), None, time.monotonic()
            row = job.strike(fault)
            if row is not None:
                row["seconds"] = round(time.monotonic() - began, 3)
            elif tries < _TRIES:
                queue.append((fault, tries + 1))
        job.finish()
        job.recovered()
        return False
    except Failed as failed:
        if not job.rows:
            job.row(fault, Injection(fault.phase, None, fault.rank, 0, time.monotonic()))
        elif row is None and job.rows[-1]["number"] != fault.number and tries < _TRIES:
            queue.append((fault, tries + 1))  # the life after the fault before it failed
        job.rows[-1] |= {"problem": str(failed), "log": job.output()[-2000:]}
        job.abandon()
        return True


def build_shim(folder: Path) -> Path | None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library, source = folder / "io_faults.so", ROOT / "packages/forge-ckpt/tests/io_faults.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--campaign", action="store_true", help="the whole plan, into runs/ and docs/"
    )
    parser.add_argument("--suite", default="", help="only these suites, by comma")
    parser.add_argument("--faults", type=int, default=20, help="so many in all, without --campaign")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=None, help="JSON lines; faults in it are not repeated"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="end after the job that is then under way"
    )
    parser.add_argument(
        "--keep", type=Path, default=None, help="folder for the runs; failed ones stay there"
    )
    parser.add_argument(
        "--mistakes", action="store_true", help="plant mistakes in the code, which must be found"
    )
    args = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="forge-chaos-shim-"))
        shim = build_shim(folder)
        if shim is not None:
            os.environ["LD_PRELOAD"] = str(shim)
            os.execv(sys.executable, [sys.executable, "-m", "tests.chaos.campaign", *sys.argv[1:]])
    names = chosen_suites(args.suite, args.campaign)
    total = sum(PLAN[name] for name in names)
    plan = {
        n: PLAN[n] if args.campaign else max(1, round(args.faults * PLAN[n] / total)) for n in names
    }
    if args.campaign and args.out is None:
        args.out = ROOT / "runs/chaos.jsonl"
        args.out.parent.mkdir(exist_ok=True)
    done = done_rows(args.out)
    left = {}
    for name in names:
        faults = make_schedule(args.seed, plan[name], SUITES[name].kinds, SUITES[name].nproc[0])
        left[name] = [fault for fault in faults if (name, args.seed, fault.number) not in done]
    prepare()
    plants.fault_matrix()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="forge-chaos-"))
    if args.mistakes:
        return find_mistakes(folder, args.seed)
    end, failures, count = time.monotonic() + 60 * args.minutes, 0, 0
    try:
        for row in run_suites(left, folder / str(os.getpid())):
            row |= {"campaign_seed": args.seed, "commit": head()}
            count += 1
            failures += bool(row["problem"])
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            if row["problem"] or args.out is None:
                print(json.dumps(row), flush=True)
            if time.monotonic() > end:
                break
    finally:
        if args.keep is None and not failures:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{count} faults, {failures} failures", flush=True)
    if args.campaign:
        subprocess.run([sys.executable, "-m", "tests.chaos.page", str(args.out)], check=True)
    return int(bool(failures))


def chosen_suites(named: str, campaign: bool) -> list[str]:
    """Those that are named, or all, without those that cannot run here; srun, with its half a minute a fault, is in no smoke."""
    names = [name for name in named.split(",") if name]
    names = names or [name for name in PLAN if campaign or name != "srun"]
    if "srun" in names and (reason := why_not()):
        print(f"no suite srun: {reason}", file=sys.stderr)
        names.remove("srun")
    if "disk" in names and "LD_PRELOAD" not in os.environ:
        print("no suite disk: it needs a C compiler and LD_PRELOAD", file=sys.stderr)
        names.remove("disk")
    return names


def find_mistakes(folder: Path, seed: int) -> int:
    """Plant each mistake, and strike until an invariant fails; 1 if one is not found in 60 faults."""
    missed = 0
    for number, (mistake, (name, make)) in enumerate(plants.MISTAKES.items()):
        suite, count, found = SUITES[name], 0, ""
        reference = make_reference(folder / f"reference-{number}", suite.numbers)
        pid = os.fork()  # the mistake ends with this process
        if pid == 0:
            make()
            faults = make_schedule(seed, 60, suite.kinds, suite.nproc[0])
            for row in run_suite(suite, faults, folder / f"mistake-{number}", reference):
                count, found = count + 1, row["problem"]
                if found:
                    break
            told = f"found after {count} faults: {found[:200]}" if found else "NOT FOUND"
            print(f"{mistake}: {told}", flush=True)
            os._exit(not found)
        missed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return int(bool(missed))


def run_suites(left: dict[str, list[Fault]], folder: Path) -> Iterator[dict[str, Any]]:
    """Rows of all suites, three dozens of each in turn: a campaign that ends early has seen some of everything."""
    part, references = 0, dict[tuple[str, ...], Reference]()
    while any(left.values()):
        for name, faults in left.items():
            left[name], chosen = faults[_TURN:], faults[:_TURN]
            suite, part = SUITES[name], part + 1
            if chosen and suite.numbers not in references:
                made = make_reference(folder / f"reference-{part}", suite.numbers)
                references[suite.numbers] = made
            if chosen:
                yield from run_suite(suite, chosen, folder / f"{part}", references[suite.numbers])


def done_rows(out: Path | None) -> set[tuple[str, int, int]]:
    """(suite, seed, number) of faults whose last row is no failure."""
    if out is None or not out.exists():
        return set()
    rows = map(json.loads, out.read_text().splitlines())
    last = {(row["suite"], row["campaign_seed"], row["number"]): row["problem"] for row in rows}
    return {key for key, problem in last.items() if not problem}


@cache
def head() -> str:
    return short_commit(ROOT, _SOURCES)


if __name__ == "__main__":
    sys.exit(main())

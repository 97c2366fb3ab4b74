"""Draw valid jobs, run each through the real runner in a layout, and compare it with the reference.

    hatch run fuzz --seed 7 --minutes 60                     # a summary on the console, all in runs/fuzz/7
    hatch run fuzz --seed 7 --minutes 10 --only tp=2 --only "optimizer=muon"
    hatch run fuzz --seed 7 --first 12 --count 1             # job 12 of the seed alone
    hatch run fuzz --job runs/fuzz/7/7.12.0/shrunk.toml      # the job of a file again
    hatch run fuzz --seed 7 --minutes 60 --record            # also in docs/data/fuzz.json and docs/equivalence.md

A job that differs runs again in float64, where a difference of rounding vanishes. Any other is shrunk to the smallest job
that still differs, which is written as a TOML file with its seed and its cause. Jobs that Forge rejects before the first step
are counted and drawn anew. Leaves with 1 if a job differs by more than rounding, or fails, with 2 for a wrong option.
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
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.fuzz import attempt, page
from tests.fuzz.case import write_case
from tests.fuzz.compare import FLOAT64, compare, same_bits
from tests.fuzz.draw import draw
from tests.fuzz.files import write_job
from tests.fuzz.job import Job, axes
from tests.fuzz.shrink import cause, shrink

ROOT = Path(__file__).resolve().parents[2]
_ATTEMPTS = 4  # draws for a number whose jobs are rejected
_MARK = "# job: "
#: Largest error in units of its bound that is taken for rounding if it vanishes in float64: of 16 bits, and of fp32.
ROUNDING = (3.0, 50.0)
#: Values that round to 16 bits, and those that do not.
_EXACT = {"precision": "fp32", "moments": "fp32"}


@dataclass
class Outcome:
    """What became of a job.

    kind     equal, different, failed, rejected, or close routes: an expert was chosen by rounding in the first step
    against  reference, or one process of Forge
    text     the first difference, the problem, or the error
    quantity that differs first; "weights" of any name
    worst    largest error in units of its bound
    steps    that were compared
    """

    job: Job
    kind: str
    against: str = ""
    text: str = ""
    quantity: str = ""
    worst: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    problem: tuple[str, str] | None = None
    shrunk: Job | None = None
    explained: str = ""

    def row(self) -> dict[str, Any]:
        """As plain data."""
        found = {k: v for k, v in vars(self).items() if k not in ("job", "shrunk")}
        own = json.loads(self.job.to_json())
        shrunk = self.shrunk and {**json.loads(self.shrunk.to_json()), "cause": cause(self.shrunk)}
        return {"job": self.job.name, **found, **own, "shrunk": shrunk}


def against(job: Job) -> str:
    """What the job is compared with: the reference, or one process where that lacks a value of the job."""
    lacks = any(job[name] in axis.against for name, axis in axes().items())
    return "one process" if lacks else "reference"


def try_job(job: Job, folder: Path, other: str | None = None, double: bool = False) -> Outcome:
    """Run a job in its layouts and compare it; with `double` in float64, after which this process has no other ranks."""
    begun, other = time.monotonic(), other or against(job)
    try:
        outcome = _compared(job, folder, other, double)
    except attempt.Rejected as problem:
        outcome = Outcome(job, "rejected", text=str(problem), problem=(problem.key, problem.code))
    except attempt.Failed as error:
        # the kind of the error, whose text may name sizes
        kind = str(error).partition(":")[0].rpartition(".")[2]
        outcome = Outcome(job, "failed", text=str(error), quantity=kind)
    except Exception as error:  # of the fuzzer itself, which goes on
        text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        outcome = Outcome(job, "failed", text=text, quantity=type(error).__name__)
    outcome.against, outcome.seconds = other, round(time.monotonic() - begun, 2)
    return outcome


def _compared(job: Job, folder: Path, other: str, double: bool) -> Outcome:
    # what an earlier job left in a cache may have been made by other sources
    os.environ["FORGE_CACHE"] = str(folder / "cache")
    path = write_job(job, folder / "ranks")
    got = attempt.run(job, path, double)
    alone = write_job(job, folder / "alone")
    if other == "reference":
        initial = attempt.begin(alone, double)
        case = write_case(job, alone, folder / "case", initial, attempt.left_out(job), double)
        wanted = attempt.run_reference(case)
    else:
        wanted = attempt.run_alone(job, alone, double)
        initial = wanted.initial
    # a process that was killed before the first save has told nothing of its beginning
    if got.initial and (found := same_bits(got.initial, initial)):
        return Outcome(job, "different", text=str(found), quantity="initial", worst=found.error)
    got = replace(got, initial=initial)
    compared = compare(job, got, wanted, FLOAT64 if double else None)
    kind = "equal" if compared.steps else "close routes"
    if compared.difference is not None:
        kind = "different"
    text = str(compared.difference or "")
    quantity = compared.difference.quantity.split()[0] if compared.difference else ""
    return Outcome(job, kind, "", text, quantity, compared.worst, compared.steps)


# ---- a campaign


def outcomes(args: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """The jobs of a seed, one after another, those that are rejected included."""
    for number in range(args.first, args.first + args.count):
        for again in range(_ATTEMPTS):
            job = draw(args.seed, number, again, dict(args.only))
            job = exact(job) if args.float64 else job
            with tempfile.TemporaryDirectory(dir=folder) as name:
                outcome = try_job(job, Path(name), args.against, args.float64)
            yield outcome
            if outcome.kind not in ("rejected", "close routes"):
                break


def main(given: list[str] | None = None) -> int:
    """Run a campaign; its exit code."""
    args = arguments(given)
    folder = args.folder or ROOT / "runs/fuzz" / str(args.seed)
    folder.mkdir(parents=True, exist_ok=True)
    begun, found = time.monotonic(), list[Outcome]()
    jobs: Iterator[Outcome] = outcomes(args, folder)
    if args.job:
        jobs = iter([try_job(args.job, _new(folder / "again"), args.against, args.float64)])
    with (folder / "jobs.jsonl").open("a") as log:
        for outcome in jobs:
            found.append(outcome)
            print(_line(outcome), flush=True)
            bad = outcome.kind in ("different", "failed")
            if bad and not args.stop_first and args.shrink_minutes:
                _examine(outcome, folder, args)
            log.write(json.dumps(outcome.row()) + "\n")
            log.flush()
            if (bad and args.stop_first) or time.monotonic() - begun > 60 * args.minutes:
                break
    print(page.summary([outcome.row() for outcome in found]))
    if args.record:
        page.record([outcome.row() for outcome in found], args.seed, time.monotonic() - begun)
    return int(any(o.kind in ("different", "failed") and not o.explained for o in found))


def _examine(outcome: Outcome, folder: Path, args: argparse.Namespace) -> None:
    """Say whether a difference is one of rounding; shrink any other, and write the job."""
    end = time.monotonic() + 60 * args.shrink_minutes
    work = _new(folder / outcome.job.name)
    _write(outcome.job, outcome, work / "drawn.toml")
    # a wrong precision vanishes in float64, too, and is larger than a bound that rounding exceeds here and there
    most = 0.0 if args.float64 else ROUNDING[exact(outcome.job) == outcome.job]
    if outcome.kind == "different" and outcome.worst < most:
        _write(exact(outcome.job), outcome, work / "exact.toml")
        if in_float64(work / "exact.toml", outcome.against):
            outcome.explained = "equal in float64"
            print("  equal in float64", flush=True)
            return

    def differs(job: Job) -> bool:
        with tempfile.TemporaryDirectory(dir=work) as name:
            found = try_job(job, Path(name), outcome.against, args.float64)
        return (found.kind, found.quantity) == (outcome.kind, outcome.quantity)

    outcome.shrunk = job = shrink(outcome.job, differs, lambda: time.monotonic() > end)
    with tempfile.TemporaryDirectory(dir=work) as name:
        again = try_job(job, Path(name), outcome.against, args.float64)
        _write(job, again, work / "shrunk.toml")
    print(f"  {work / 'shrunk.toml'}: {cause(job)}, in the layouts {job.layouts()}")
    print(f"  {again.text.partition(chr(10))[0]}", flush=True)


def _write(job: Job, outcome: Outcome, path: Path) -> None:
    """The text of a job, after its seed, its cause, and the line from which it is read again."""
    with tempfile.TemporaryDirectory() as name:
        text = write_job(job, Path(name)).read_text().replace(name, "FOLDER")
    head = [f"seed {job.name}: {outcome.text.partition(chr(10))[0]}", f"with {cause(job)}"]
    lines = [f"# {line}" for line in (*head, f"in the layouts {job.layouts()}")]
    path.write_text("\n".join([*lines, _MARK + job.to_json(), text]))


def exact(job: Job) -> Job:
    """The job without what rounds to 16 bits on one side of the comparison only."""
    for axis, value in _EXACT.items():
        job = job.with_value(axis, value)
    return job.with_value("optimizer", "muon") if job["optimizer"] == "muon, bf16" else job


def in_float64(path: Path, other: str) -> bool:
    """Whether the job of a file is equal in float64, in a process of its own."""
    options = ["--job", str(path), "--against", other, "--float64", "--shrink-minutes", "0"]
    options += ["--folder", str(path.parent / "float64")]
    command = [sys.executable, "-m", "tests.fuzz.run", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def read_job(path: Path) -> Job:
    """The job of a file that the shrinker wrote."""
    lines = [line for line in path.read_text().splitlines() if line.startswith(_MARK)]
    return Job.from_json(lines[0].removeprefix(_MARK))


def _new(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _line(outcome: Outcome) -> str:
    text = outcome.text.partition("\n")[0][:300] or f"worst {outcome.worst:.2g} of the bound"
    return f"{outcome.job.name} {outcome.seconds:.0f} s {outcome.kind}: {text}"


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Checked options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0, help="no job begins after them")
    parser.add_argument("--first", type=int, default=0, help="number of the first job")
    parser.add_argument("--count", type=int, default=10**9, help="most jobs")
    parser.add_argument(
        "--only", action="append", default=[], metavar="AXIS=VALUE", help="of all jobs"
    )
    parser.add_argument(
        "--job", type=_job, metavar="TOML", help="a shrunk job, in place of drawn ones"
    )
    parser.add_argument(
        "--float64", action="store_true", help="run all jobs in float64, within 1e-9"
    )
    parser.add_argument("--against", choices=("reference", "one process"), help="of all jobs")
    parser.add_argument("--stop-first", action="store_true", help="end at the first difference")
    parser.add_argument("--shrink-minutes", type=float, default=10.0, help="of one job; 0: none is")
    parser.add_argument("--folder", type=Path, help="for logs and shrunk jobs (runs/fuzz/SEED)")
    parser.add_argument(
        "--record", action="store_true", help="add the counts to docs/data/fuzz.json"
    )
    args = parser.parse_args(given)
    args.only = [tuple(pair.split("=", 1)) for pair in args.only]
    for pair in args.only:
        known = axes().get(pair[0])
        if known is None or len(pair) < 2 or pair[1] not in known.values:
            values = ", ".join(known.values) if known else ", ".join(axes())
            parser.error(f"--only {'='.join(pair)!r}: known are {values}")
    return args


def _job(path: str) -> Job:
    try:
        return read_job(Path(path))
    except (OSError, IndexError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{path} is not a file of the shrinker ({error})"
        ) from None


if __name__ == "__main__":
    # under its own name, so that ranks can import its functions
    from tests.fuzz.run import main as run_main

    sys.exit(run_main())

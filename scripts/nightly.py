"""Run what takes hours, in parts of at most an hour: `hatch run nightly`, or `hatch run nightly PART ...`.

Parts that are green for the sources as they are do not run again, so a night that was cut off goes on where it was;
`--again` runs them all the same, `--list` shows the parts with their last result. Campaigns with `--resume` keep their
finished rows. Results and logs are in runs/nightly. Exit code 1 if a part failed or did not end within its hour.

Seen to fail: `slurm-story` on a machine without Slurm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs/nightly"
STATE = FOLDER / "state.json"
_LIMIT_SECONDS = 3600.0
_GRACE_SECONDS = 30.0
_TORCH = {"2.11": "2.11.0", "2.12": "2.12.1", "2.14": "2.14.1", "2.15": "2.15.0"}
_TESTED = ("packages", "apps", "tests")
_NULL_GPU = ("tests", "proofs", "matrix", "waits", "layouts", "memory")


class Part(NamedTuple):
    """A command, what it covers, and the folders that it tests."""

    command: list[str]
    covers: str
    folders: tuple[str, ...] = _TESTED


def parts() -> dict[str, Part]:
    python = sys.executable
    pytest = [python, "-m", "pytest", "-n", "2", "--dist=loadfile", "--no-loadscope-reorder"]
    packages = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("packages/*"))
    rest = sorted(
        str(p.relative_to(ROOT))
        for p in [*ROOT.glob("apps/*"), *ROOT.glob("tests/*")]
        if any(p.rglob("test_*.py")) and p.name != "torch_versions"
    )
    found = {
        "everything": Part(
            [*pytest, "--lane", "everything", "--write-durations", f"{FOLDER}/durations.json",
             "--passed", f"{FOLDER}/passed-{_digest()}.txt", "packages", "apps", "tests"],
            "every test; begun again, those that have not passed",
        ),
        "matrix": Part(
            [python, "tests/equivalence/run_cells.py", "--resume", "--out", f"{FOLDER}/equivalence.json"],
            "all cells of docs/equivalence.md",
        ),
        "reshard": Part(
            [python, "-m", "tests.reshard.run_pairs", "--resume", "--out", f"{FOLDER}/reshard.json"],
            "all pairs of docs/reshard.md",
        ),
        "chaos": Part(
            [python, "-m", "tests.chaos.campaign", "--faults", "200", "--minutes", "50",
             "--seed", str(int(_digest(), 16) % 10**6), "--out", f"{FOLDER}/chaos-{_digest()}.jsonl"],
            "200 faults in real runs, another seed for other sources",
        ),
        "fuzz": Part(
            [python, "-m", "tests.fuzz.run", "--minutes", "10", "--seed", str(int(_digest(), 16) % 10**6),
             "--folder", f"{FOLDER}/fuzz-{_digest()}"],
            "random jobs against an independent reference, another seed for other sources",
        ),
        "foreign": Part(["hatch", "run", "foreign:suite"], "other frameworks under the supervisor"),
        "pages": Part(
            [python, "-m", "tests.documents.blocks"], "every block of every page; needs Slurm", (".",)
        ),
        "slurm-story": Part([python, "-m", "tests.slurm.story"], "a real Slurm that loses nodes"),
        "vlm-learning": Part([python, "-m", "tests.vlm.learn"], "what vision-language models learn"),
        "vlm-matched-loss": Part([python, "-m", "tests.vlm.matched_loss"], "fusions at equal loss"),
        "optimizers": Part(
            [python, "-m", "benchmarks.optimizer_study", "--resume", "--folder", str(FOLDER / "optimizers")],
            "the study of docs/optimizers.md",
        ),
    }  # fmt: skip
    for lane in ("test", "quick", "ci"):
        command = [python, "tests/mutations/run.py", "--lane", lane]
        found[f"mutations-{lane}"] = Part(command, f"planted mistakes against lane {lane}")
    for short, version in _TORCH.items():
        for name, folders in (("packages", packages), ("rest", rest)):
            suite = ["hatch", "run", f"torch.{version}:suite", *folders]
            found[f"torch-{short}-{name}"] = Part(suite, f"{name} with torch {version}")
    for name in _NULL_GPU:
        found[f"null-gpu-{name}"] = Part(["hatch", "run", "null-gpu", name], "CUDA paths, no GPU")
    return found


def _digest(folders: tuple[str, ...] = _TESTED) -> str:
    """Of the files that a part tests."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = hashlib.sha256()
    for name in sorted(names.splitlines()):
        if (ROOT / name).is_file():
            found.update(name.encode() + (ROOT / name).read_bytes())
    return found.hexdigest()[:12]


def run(name: str, part: Part) -> dict[str, Any]:
    log, began = FOLDER / f"{name}.log", time.monotonic()
    print(f"{name}: {part.covers}; log in {log.relative_to(ROOT)}", flush=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            part.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    seconds = round(time.monotonic() - began)
    result = "passed" if code == 0 else "no end within an hour" if code is None else f"exit {code}"
    print(f"{name}: {result} in {seconds} s", flush=True)
    return {"digest": _digest(part.folders), "result": result, "seconds": seconds}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the part, children included."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                continue


def main() -> int:
    every = parts()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(every))
    parser.add_argument("--again", action="store_true", help="also run parts that are green")
    parser.add_argument("--list", action="store_true", help="show the parts, and run nothing")
    args = parser.parse_args()
    if unknown := set(args.parts) - every.keys():
        parser.error(f"{', '.join(sorted(unknown))} must be one of {', '.join(every)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    state = json.loads(STATE.read_text()) if STATE.exists() else {}
    if args.list:
        for name, part in every.items():
            row = state.get(name, {"result": "never ran", "seconds": 0})
            print(f"{name:20} {row['result']:22} {row['seconds']:5} s  {part.covers}")
        return 0
    red = []
    for name in args.parts or every:
        row, digest = state.get(name, {}), _digest(every[name].folders)
        if not args.again and row.get("result") == "passed" and row.get("digest") == digest:
            print(f"{name}: passed before, for the same sources")
            continue
        state[name] = run(name, every[name])
        STATE.write_text(json.dumps(state, indent=1) + "\n")
        if state[name]["result"] != "passed":
            red.append(name)
    print(f"red: {', '.join(red)}" if red else "all green")
    return int(bool(red))


if __name__ == "__main__":
    sys.exit(main())

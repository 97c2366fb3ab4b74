"""The speed of Forge next to its peers, in one run: `hatch run bench`.

    hatch run bench                              # all rows, one process each; lines go to runs/bench.jsonl
    hatch run bench --quick                      # tiny shapes in one process, at most 20 s: do all rows run?
    hatch run bench --rows 'moe*' --peer torchtitan=/src/torchtitan
    hatch run bench --render runs/bench.jsonl    # docs/benchmarks.md from a run; several files: a later one replaces rows
    hatch run bench --growth                     # exponents of time and memory

A figure is the median of (time of the other side / time of Forge) over interleaved rounds: above 1, Forge is faster. A row
passes if the median is at least its bound and the lower quartile at least 0.03 less. The rows `noise` at both ends of a run compare Forge with itself: outside of 0.98 to 1.02 the
run is void. Exit codes: 0 done, 1 a row failed or is below its bound, 3 void. --quick judges no
figures, only failures, unless --rounds is given.
Nothing is downloaded: a peer that is not installed, nor given by --peer NAME=PATH or --peer-python, is reported as absent.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import fnmatch
import hashlib
import importlib.metadata
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks import harness
from benchmarks.rows import Row, Setting, all_rows

NOISE = (0.98, 1.02)
QUARTILE = 0.03  # the lower quartile may be this far below the bound
PASSED, FAILED, VOID = 0, 1, 3
LIMIT = 600  # seconds of a row
PEERS = ("transformers", "torchtitan", "datasets", "mosaicml-streaming", "liger-kernel", "lion-pytorch", "schedulefree")  # fmt: skip


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--rows", default="*", help="patterns of row names, such as 'moe*,loss*'")
    add("--list", action="store_true", help="print the rows with their settings")
    add("--gpu", action="store_true", help="run on the first CUDA device")
    add("--preset", choices=["h100"], help="sizes for a GPU of 80 GB; implies --gpu")
    add("--quick", action="store_true", help="tiny shapes, one round; judges no figures")
    add("--peer", action="append", default=[], metavar="NAME=PATH", help="sources of a peer")
    add("--peer-python", metavar="PATH", help="a Python that has peers which this one lacks")
    add("--rounds", type=int, help="default: 21, or 1 with --quick")
    add("--threads", type=int, help="CPU threads of torch (default: all cores; 1 with --quick)")
    add("--out", type=Path, help="default: runs/bench.jsonl, or runs/bench-quick.jsonl")
    add(
        "--render",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="write docs/benchmarks.md; a later run replaces rows of an earlier one",
    )
    add("--growth", action="store_true", help="measure exponents; adds lines to --out")
    add(
        "--slow", default="", metavar="SIDE=SECONDS", help="slow one side, to see it in the figures"
    )
    add("--run-row", help=argparse.SUPPRESS)  # the process of one row
    add("--serve", help=argparse.SUPPRESS)  # sides of a row in another process
    add("--grow", nargs=2, help=argparse.SUPPRESS)  # one size of a growth
    args = parser.parse_args(given)
    args.given = list(sys.argv[1:] if given is None else given)
    args.size = args.preset or ("quick" if args.quick else "full")
    args.out = args.out or Path(f"runs/bench{'-quick' if args.quick else ''}.jsonl")
    args.device = "cuda" if args.gpu or args.preset else "cpu"
    args.judges = not args.quick or args.rounds is not None  # one cold round says nothing
    args.rounds = args.rounds or (1 if args.quick else 21)
    return args


# ---- one row


def setting_of(args: argparse.Namespace) -> Setting:
    """The setting of this process; sets torch's threads."""
    torch.set_num_threads(args.threads or (1 if args.quick else os.cpu_count() or 1))
    return Setting(args.size, args.device)


def measure(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """Run all sides of a row in turn; the content of its line."""
    setting = setting_of(args)
    with setting.stack, contextlib.redirect_stdout(io.StringIO()):
        steps, absent = make_sides(row, setting, args)
        side, _, pause = args.slow.partition("=")
        if side in steps:
            steps[side] = partial(slowed, steps[side], float(pause))
        off = differences(row, steps)
        warmup = row.warmup if args.judges else 0
        seconds = harness.interleave(steps, args.rounds, warmup, setting.device)
    first = next(iter(row.sides))
    spreads = {name: harness.spread(values) for name, values in seconds.items()}
    others = {} if row.derive else {name: v for name, v in seconds.items() if name != first}
    derive = row.derive or (lambda medians: {})
    return {
        "row": row.name,
        "settings": row.settings,
        "seconds": spreads,
        "ratios": {name: harness.ratios(v, seconds[first]) for name, v in others.items()},
        "bounds": {name: row.bounds.get(name, 1.0) for name in others},
        "differences": off,
        "absent": absent,
        "derived": derive({name: s["median"] for name, s in spreads.items()}),
    }


def make_sides(
    row: Row, setting: Setting, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, str]]:
    """Steps by side, made here, by --peer-python or on several ranks; and why sides are absent."""
    steps: dict[str, Any] = {}
    absent: dict[str, str] = {}
    if row.ranks > 1:
        return Served(sys.executable, row, args, setting).steps, absent
    case = row.case(setting, **row.options)
    for name, make in row.sides.items():
        try:
            steps[name] = make(case)
        except ImportError as error:
            absent[name] = str(error)
    if absent and args.peer_python and not args.serve:
        served = Served(args.peer_python, row, args, setting).steps
        steps |= {
            name: served[name] for name in list(absent) if name in served and absent.pop(name)
        }
    return steps, absent


def slowed(step: Callable[[], object], seconds: float) -> object:
    """A step and a pause."""
    result = step()
    time.sleep(seconds)
    return harness.Seconds(result + seconds) if isinstance(result, harness.Seconds) else result


def differences(row: Row, steps: dict[str, Any]) -> dict[str, float]:
    """max|a - b| / max|b| of the results of one step each, b being the first side's. AssertionError over the tolerance."""
    found: dict[str, torch.Tensor] = {}
    for name, step in steps.items() if row.tolerance is not None else ():
        getattr(step, "before", harness.nothing)()
        result: Any = step()
        getattr(step, "after", harness.nothing)()
        if not isinstance(result, harness.Seconds):
            parts = [result] if isinstance(result, torch.Tensor) else result
            found[name] = torch.cat([part.detach().flatten().double() for part in parts])
    wanted = found.pop(next(iter(row.sides)), torch.ones(1))
    off = {name: float((v - wanted).abs().max() / wanted.abs().max()) for name, v in found.items()}
    wrong = [name for name, error in off.items() if not error <= (row.tolerance or 0)]
    assert not wrong, f"{', '.join(wrong)}: other results than Forge, {off}"
    return off


class Served:
    """Sides of a row in processes of their own, which time themselves: another Python, or several ranks.

    Each reads names of sides from stdin and answers with seconds. `steps` are the sides that it could make.
    """

    def __init__(self, python: str, row: Row, args: argparse.Namespace, setting: Setting) -> None:
        command = [python, "-m", "benchmarks.suite", *args.given, "--serve", row.name]
        ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 20_000)}
        ranks |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(row.ranks))
        self.processes: list[Any] = []
        for rank in range(row.ranks):
            env = {**os.environ}
            if row.ranks > 1:
                env |= ranks | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process: Any = subprocess.Popen(command, cwd=harness.ROOT, env=env, **pipes)  # type: ignore[call-overload]
            setting.stack.callback(process.wait)
            setting.stack.callback(process.stdin.close)
            self.processes.append(process)
        self.steps = {name: partial(self, name) for name in self._answers()[0].split()}

    def _answers(self) -> list[str]:
        return [process.stdout.readline() for process in self.processes]

    def __call__(self, side: str) -> harness.Seconds:
        for process in self.processes:
            print(side, file=process.stdin, flush=True)
        return harness.Seconds(max(map(float, self._answers())))


def serve(row: Row, args: argparse.Namespace) -> None:
    """Print the names of sides, and answer each name with the seconds of a step until stdin ends."""
    setting, answers = setting_of(args), sys.stdout
    with setting.stack, contextlib.redirect_stdout(sys.stderr):
        steps, _ = make_sides(dataclasses.replace(row, ranks=1), setting, args)
        print(*steps, file=answers, flush=True)
        for line in sys.stdin:
            one = {"side": steps[line.strip()]}
            found = harness.interleave(one, 1, 0, setting.device)
            print(found["side"][0], file=answers, flush=True)


# ---- a run


def run(rows: list[Row], args: argparse.Namespace) -> int:
    """Run all rows, write a line for each and return the exit code."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    codes = [PASSED]
    with args.out.open("w") as file:

        def write(line: dict[str, Any]) -> None:
            print(json.dumps(harness.rounded(line)), file=file, flush=True)
            print(text_of(line), flush=True)

        device = harness.environment(torch.device(args.device)) | {"cpus": os.cpu_count()}
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        head = {"run": now, "environment": device, "versions": versions()}
        write({**head, "command": args.given, "limits": limits(args)})
        for row in rows:
            line = (here if args.quick else apart)(row, args)
            line["verdict"], code = verdict(line) if args.judges or "error" in line else ("ran", 0)
            codes.append(code)
            write(line)
    return max(codes)


def here(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """The line of a row that runs in this process."""
    try:
        return measure(row, args)
    except Exception as error:
        return {"row": row.name, "error": f"{type(error).__name__}: {error}"[:500]}


def apart(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """The line of a row from a process of its own: its memory, threads and compiled code meet no other row."""
    command = [sys.executable, "-m", "benchmarks.suite", *args.given, "--run-row", row.name]
    try:
        done = subprocess.run(
            command, cwd=harness.ROOT, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return {"row": row.name, "error": f"did not end in {LIMIT} s"}
    if done.returncode:
        return {"row": row.name, "error": f"exit {done.returncode}: {done.stderr[-500:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def verdict(line: dict[str, Any]) -> tuple[str, int]:
    """passed, below NAMES (of the bound), failed, quiet or void; and the exit code."""
    if "error" in line:
        return "failed", FAILED
    if line["row"].startswith("noise"):
        median = line["ratios"]["again"]["median"]
        return ("quiet", PASSED) if NOISE[0] <= median <= NOISE[1] else ("void", VOID)
    below = []
    for name, ratio in line["ratios"].items():
        bound = line["bounds"][name]
        if bound is not None and (ratio["median"] < bound or ratio["q1"] < bound - QUARTILE):
            below.append(name)
    return (f"below {', '.join(below)}", FAILED) if below else ("passed", PASSED)


def text_of(line: dict[str, Any]) -> str:
    """A line for a terminal."""
    if "run" in line:
        found = ", ".join(f"{name} {value:.3g}" for name, value in line["limits"].items())
        return f"{line['run']}  {line['environment']['device_name']}  limits: {found}"
    if "error" in line:
        return f"{line['row']:28} FAILED {line['error']}"
    if line["verdict"] == "ran":
        return f"{line['row']:28} ran: {', '.join(line['seconds'])}" + "".join(
            f"; no {n}" for n in line["absent"]
        )
    ratio = "  ".join(
        f"{name} {r['median']:.2f} [{r['q1']:.2f}, {r['q3']:.2f}]"
        for name, r in line["ratios"].items()
    )
    derived = "  ".join(f"{name} {value}" for name, value in line.get("derived", {}).items())
    missing = "".join(f"  {name}: absent" for name in line["absent"])
    return f"{line['row']:28} {line['verdict']:10} {ratio}{derived}{missing}"


def versions() -> dict[str, str | None]:
    """Versions of the peers; None is absent."""
    found: dict[str, str | None] = {}
    for name in PEERS:
        found[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def limits(args: argparse.Namespace) -> dict[str, float]:
    """What the device does at most: matmuls in TFLOP/s, copies, digests and the disk in GB/s."""
    setting = setting_of(args)
    n, size = setting.of(2048, 128, 8192), setting.of(2**28, 2**22)
    path, data = setting.folder / "limits", os.urandom(size)
    source, target = (torch.ones(size, device=setting.device, dtype=torch.uint8) for _ in range(2))
    fp32 = torch.randn(n, n, device=setting.device)
    bf16 = fp32.bfloat16()

    def write() -> None:
        with path.open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())

    steps: dict[str, tuple[Callable[[], object], float]] = {
        "matmul_fp32_tflops": (lambda: fp32 @ fp32, 2 * n**3 / 1e12),
        "matmul_bf16_tflops": (lambda: bf16 @ bf16, 2 * n**3 / 1e12),
        "copy_gb_per_s": (lambda: target.copy_(source), size / 1e9),
        "sha256_gb_per_s": (lambda: hashlib.sha256(data).digest(), size / 1e9),
        "disk_write_gb_per_s": (write, size / 1e9),
        "cached_read_gb_per_s": (path.read_bytes, size / 1e9),
    }
    with setting.stack:
        found = {
            name: harness.interleave({name: step}, setting.of(5, 1), 1, setting.device)[name]
            for name, (step, _) in steps.items()
        }
    return {name: steps[name][1] / min(seconds) for name, seconds in found.items()}


def is_named(name: str, patterns: str) -> bool:
    """Whether one of the patterns, with commas between them, matches."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(","))


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    for peer in args.peer:
        sys.path.insert(0, peer.partition("=")[2])
    if args.render:
        from benchmarks.render import render

        render(args.render)
        return PASSED
    if args.growth or args.grow:
        from benchmarks import growth

        return growth.main(args)
    rows = all_rows()
    if args.serve:
        serve(rows[args.serve], args)
        return PASSED
    if args.run_row:
        print(json.dumps(measure(rows[args.run_row], args)), flush=True)
        return PASSED
    chosen = [
        row
        for name, row in rows.items()
        if is_named(name, args.rows) and not name.startswith("noise")
    ]
    if args.list:
        print("\n".join(f"{row.name:28} {', '.join(row.sides)}: {row.settings}" for row in chosen))
        return PASSED
    if not chosen:
        sys.exit(f"--rows {args.rows}: no row has such a name; --list prints them")
    return run([rows["noise-start"], *chosen, rows["noise-end"]], args)


if __name__ == "__main__":
    sys.exit(main())

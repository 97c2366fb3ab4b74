"""The speed of Forge next to its peers, in one run: `hatch run bench`.

    hatch run bench                              # all rows, one process each; lines go to runs/bench.jsonl
    hatch run bench --quick                      # tiny shapes in one process, at most 20 s: do all rows run?
    hatch run bench --rows 'moe*' --peer torchtitan=/src/torchtitan
    hatch run bench --render runs/bench.jsonl    # docs/benchmarks.md from a run
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
import datetime
import fnmatch
import hashlib
import importlib.metadata
import io
import json
import os
import statistics
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
PEERS = ("transformers", "torchtitan", "datasets", "mosaicml-streaming", "liger-kernel", "lion-pytorch", "schedulefree")  # fmt: skip


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="*", help="pattern of row names, such as 'moe*'")
    parser.add_argument("--list", action="store_true", help="print the rows with their settings")
    parser.add_argument("--gpu", action="store_true", help="run on the first CUDA device")
    parser.add_argument(
        "--preset", choices=["h100"], help="sizes for a GPU of 80 GB; implies --gpu"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes; judges no figures")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PATH", help="sources of a peer")  # fmt: skip
    parser.add_argument("--peer-python", metavar="PATH", help="Python that has peers which this one lacks")  # fmt: skip
    parser.add_argument("--rounds", type=int, help="default: 21, or 1 with --quick")
    parser.add_argument("--threads", type=int, help="CPU threads of torch (default: all cores)")
    parser.add_argument(
        "--out",
        type=Path,
        help="lines of the run (default: runs/bench.jsonl, runs/bench-quick.jsonl)",
    )
    parser.add_argument("--render", type=Path, metavar="FILE", help="write docs/benchmarks.md")
    parser.add_argument("--growth", action="store_true", help="measure exponents in place of rows")
    parser.add_argument("--slow", metavar="SIDE=SECONDS", help="slow one side, to see it in the figures")  # fmt: skip
    parser.add_argument("--run-row", help=argparse.SUPPRESS)  # the process of one row
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # sides of a row in another process
    parser.add_argument("--grow", nargs=2, help=argparse.SUPPRESS)  # one size of a growth
    args = parser.parse_args(given)
    args.size = args.preset or ("quick" if args.quick else "full")
    args.out = args.out or Path(f"runs/bench{'-quick' if args.quick else ''}.jsonl")
    args.device = "cuda" if args.gpu or args.preset else "cpu"
    args.judges = (
        not args.quick or args.rounds is not None
    )  # of one cold round there is nothing to say
    args.rounds = args.rounds or (1 if args.quick else 21)
    return args


# ---- one row


def measure(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """Run all sides of a row in turn; the content of its line."""
    setting = setting_of(args)
    absent: dict[str, str] = {}
    with setting.stack, contextlib.redirect_stdout(io.StringIO()):
        if row.ranks > 1:
            served = Served(sys.executable, row, args, setting)
            steps = {name: partial(served, name) for name in row.sides}
        else:
            case = row.case(setting, **row.options)
            steps = make_sides(row, case, setting, args, absent)
        slow(steps, args.slow)

        off = {}
        if row.tolerance is not None:
            off = differences({n: s for n, s in steps.items() if not isinstance(s, partial)})
            wrong = [name for name, error in off.items() if error > row.tolerance]
            if wrong:
                raise AssertionError(f"{', '.join(wrong)}: other results than Forge, {off}")
        warmup = row.warmup if args.judges else 0
        seconds = harness.interleave(steps, args.rounds, warmup, setting.device)
    first = next(iter(row.sides))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    compared = {} if row.derive else {n: v for n, v in seconds.items() if n != first}
    return {
        "row": row.name,
        "settings": row.settings,
        "seconds": {name: harness.spread(values) for name, values in seconds.items()},
        "ratios": {n: harness.ratios(values, seconds[first]) for n, values in compared.items()},
        "bounds": {name: row.bounds.get(name, 1.0) for name in compared},
        "differences": off,
        "absent": absent,
        **({"derived": row.derive(case, medians)} if row.derive else {}),
    }


def setting_of(args: argparse.Namespace) -> Setting:
    """The setting of this process; sets torch's threads."""
    torch.set_num_threads(1 if args.quick else args.threads or os.cpu_count() or 1)
    return Setting(args.size, args.device)


def make_sides(
    row: Row, case: Any, setting: Setting, args: argparse.Namespace, absent: dict[str, str]
) -> dict[str, Callable[[], object]]:
    """The sides that can be made, here or by --peer-python; the others are named in `absent`."""
    steps: dict[str, Callable[[], object]] = {}
    for name, make in row.sides.items():
        try:
            steps[name] = make(case)
        except ImportError as error:
            if args.peer_python and Path(args.peer_python) != Path(sys.executable):
                with contextlib.suppress(RuntimeError):
                    served = Served(args.peer_python, row, args, setting)
                    steps[name] = partial(served, name)
                    continue
            absent[name] = str(error)
    return steps


def slow(steps: dict[str, Callable[[], object]], given: str | None) -> None:
    """Add a pause to the side that --slow names."""
    name, _, seconds = (given or "").partition("=")
    if name in steps:
        step = steps[name]

        def slowed() -> object:
            time.sleep(float(seconds))
            return step()

        steps[name] = slowed


def differences(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """max|a - b| / max|b| of the results of one step each, b being the first side's."""
    found: list[tuple[str, torch.Tensor]] = []
    for name, step in steps.items():
        getattr(step, "before", harness.nothing)()
        result: Any = step()
        getattr(step, "after", harness.nothing)()
        parts = [result] if isinstance(result, torch.Tensor) else result
        found.append((name, torch.cat([part.detach().flatten().double() for part in parts])))
    wanted = found[0][1]
    return {n: float((v - wanted).abs().max() / wanted.abs().max()) for n, v in found[1:]}


class Served:
    """Sides of a row in processes of their own, which time themselves: another Python, or several ranks.

    Each reads names of sides from stdin and answers with seconds. RuntimeError if a process does not start.
    """

    def __init__(self, python: str, row: Row, args: argparse.Namespace, setting: Setting) -> None:
        command = [python, "-m", "benchmarks.suite", *options(args), "--serve", row.name]
        port = str(20_000 + os.getpid() % 20_000)
        self.processes = []
        for rank in range(row.ranks):
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": row.ranks, "LOCAL_WORLD_SIZE": row.ranks}  # fmt: skip
            ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **{k: str(v) for k, v in places.items()}}  # fmt: skip
            process = subprocess.Popen(
                command,
                cwd=harness.ROOT,
                env={**os.environ, **(ranks if row.ranks > 1 else {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            setting.stack.callback(process.wait)
            setting.stack.callback(process.stdin.close)  # type: ignore[union-attr]
            self.processes.append(process)
        if any(line != "ready" for line in self._answers()):
            raise RuntimeError(f"{python}: row {row.name} does not start there")

    def _answers(self) -> list[str]:
        return [process.stdout.readline().strip() for process in self.processes]  # type: ignore[union-attr]

    def __call__(self, side: str) -> harness.Seconds:
        for process in self.processes:
            print(side, file=process.stdin, flush=True)
        return harness.Seconds(max(map(float, self._answers())))


def serve(row: Row, args: argparse.Namespace) -> None:
    """Answer names of sides with the seconds of a step, until stdin ends."""
    setting, answers = setting_of(args), sys.stdout
    with setting.stack, contextlib.redirect_stdout(sys.stderr):
        case = row.case(setting, **row.options)
        steps: dict[str, Callable[[], object]] = {}
        for name, make in row.sides.items():
            with contextlib.suppress(ImportError):
                steps[name] = make(case)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            one = {"side": steps[line.strip()]}
            print(
                harness.interleave(one, 1, 0, setting.device)["side"][0], file=answers, flush=True
            )


# ---- a run


def run(rows: list[Row], args: argparse.Namespace) -> int:
    """Run all rows, write a line for each and return the exit code."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    with args.out.open("w") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(harness.rounded(line)) + "\n")
            file.flush()
            print(text_of(line), flush=True)

        write({
            "run": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "environment": harness.environment(device) | {"cpus": os.cpu_count()},
            "versions": versions(),
            "command": [*options(args), "--rounds", str(args.rounds)],
            "limits": limits(args),
        })  # fmt: skip
        codes = []
        for row in rows:
            line = apart(row, args) if not args.quick else here(row, args)
            line["verdict"], code = verdict(line)
            if not args.judges and "error" not in line:
                line["verdict"], code = "ran", PASSED
            codes.append(code)
            write(line)
    return max(codes, default=PASSED)


def here(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """The line of a row that runs in this process."""
    try:
        return measure(row, args)
    except Exception as error:
        if os.environ.get("BENCH_RAISE"):
            raise
        return {"row": row.name, "error": f"{type(error).__name__}: {error}"[:500]}


def apart(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """The line of a row from a process of its own: its memory, threads and compiled code meet no other row."""
    extra = ["--rounds", str(args.rounds), *(["--slow", args.slow] if args.slow else [])]
    command = [sys.executable, "-m", "benchmarks.suite", *options(args), *extra, "--run-row", row.name]  # fmt: skip
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"row"')]
    if not lines:
        return {"row": row.name, "error": f"exit {done.returncode}: {done.stderr[-500:]}"}
    return json.loads(lines[-1])


def options(args: argparse.Namespace) -> list[str]:
    """The options that a process of a row needs."""
    found = [f"--peer={given}" for given in args.peer]
    found += ["--gpu"] if args.gpu else []
    found += ["--quick"] if args.quick else []
    for name in ("preset", "peer_python", "threads"):
        value = getattr(args, name)
        found += [] if value is None else [f"--{name.replace('_', '-')}={value}"]
    return found


def verdict(line: dict[str, Any]) -> tuple[str, int]:
    """A word on a row, and its exit code."""
    if "error" in line:
        return "failed", FAILED
    if line["row"].startswith("noise"):
        median = line["ratios"]["again"]["median"]
        return ("quiet", PASSED) if NOISE[0] <= median <= NOISE[1] else ("void", VOID)
    behind = []
    for name, ratio in line["ratios"].items():
        bound = line["bounds"][name]
        if bound is not None and (ratio["median"] < bound or ratio["q1"] < bound - QUARTILE):
            behind.append(name)
    return (f"behind {', '.join(behind)}", FAILED) if behind else ("ahead", PASSED)


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
    n, size = setting.of(2048, 128, 8192), setting.of(2**28, 2**22, 2**30)
    found: dict[str, float] = {}

    def best(run: Callable[[], object], amount: float) -> float:
        seconds = harness.interleave({"x": run}, setting.of(5, 1), 1, setting.device)["x"]
        return amount / min(seconds)

    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.randn(n, n, device=setting.device, dtype=dtype)
        found[f"matmul_{name}_tflops"] = best(lambda a=a: a @ a, 2 * n**3 / 1e12)
    source, target = (torch.ones(size, dtype=torch.uint8, device=setting.device) for _ in range(2))
    found["copy_gb_per_s"] = best(lambda: target.copy_(source), size / 1e9)
    data, path = os.urandom(min(size, 2**28)), setting.folder / "limits"
    found["sha256_gb_per_s"] = best(lambda: hashlib.sha256(data).digest(), len(data) / 1e9)

    def write() -> None:
        with path.open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())

    found["disk_write_gb_per_s"] = best(write, len(data) / 1e9)
    found["cached_read_gb_per_s"] = best(path.read_bytes, len(data) / 1e9)
    setting.stack.close()
    return found


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
    chosen = [row for name, row in rows.items() if fnmatch.fnmatch(name, args.rows) and not name.startswith("noise")]  # fmt: skip
    if args.list:
        print("\n".join(f"{row.name:28} {', '.join(row.sides)}: {row.settings}" for row in chosen))
        return PASSED
    if not chosen:
        sys.exit(f"--rows {args.rows}: no row has such a name; --list prints them")
    return run([rows["noise-start"], *chosen, rows["noise-end"]], args)


if __name__ == "__main__":
    sys.exit(main())

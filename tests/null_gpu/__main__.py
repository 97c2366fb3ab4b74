"""What can be shown of CUDA without a GPU, on a device that computes nothing (docs/null-gpu.md).

hatch run null-gpu                              # all campaigns, one after another
hatch run null-gpu tests -k memory              # one of them, with its own flags
hatch run null-gpu run --ranks 2 -- forge-train run job.toml --parallel.tp=2
hatch run null-gpu run --devices 4 -- python -m forge_parallel.prove my_model:Model --device cuda
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.null_gpu import device

#: Name of a campaign -> module with `main(arguments: list[str]) -> int`.
CAMPAIGNS = {
    "tests": "tests.null_gpu.test_device",
    "proofs": "tests.null_gpu.proofs",
    "matrix": "tests.null_gpu.matrix",
    "waits": "tests.null_gpu.test_waits",
    "layouts": "tests.null_gpu.layouts",
    "memory": "tests.null_gpu.memory",
    "sizes": "tests.null_gpu.sizes",
}


def main(arguments: Sequence[str]) -> int:
    verb, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if verb in ("-h", "--help"):
        print(__doc__, f"\nCampaigns: {', '.join(CAMPAIGNS)}; each has --help", sep="")
        return 0
    if verb not in ("", "run", *CAMPAIGNS):
        print(f"{verb} is no campaign; there are: run, {', '.join(CAMPAIGNS)}", file=sys.stderr)
        return 2
    if reason := device.why_not():
        print(f"no null GPU here: {reason}", file=sys.stderr)
        return 1
    if verb == "run":
        return run(rest)
    chosen = {verb: CAMPAIGNS[verb]} if verb else CAMPAIGNS
    failed = [name for name, path in chosen.items() if importlib.import_module(path).main(rest)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def run(arguments: list[str]) -> int:
    """Any command on the null GPU; its counts and host waits are printed at its end. It gets the signals of this process."""
    parser = argparse.ArgumentParser(prog="hatch run null-gpu run", description=run.__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="processes, with a device each")
    parser.add_argument("--devices", type=int, help="of a command that starts ranks by itself")
    parser.add_argument("--memory-gib", type=float, help="of each device (139.8)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    args = parser.parse_args(arguments)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command; give it after --, such as: run -- forge-train run job.toml")
    with tempfile.TemporaryDirectory() as folder:
        waits, counts = Path(folder, "waits"), Path(folder, "counts")
        variables = device.environment(
            devices=args.devices or args.ranks,
            waits=waits,
            counts=counts,
            memory_gib=args.memory_gib,
        )
        process = subprocess.Popen(
            device.launched(command, args.ranks), env={**os.environ, **variables}
        )
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command as well
        signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
        code = process.wait()
        _print("counts", device.read(counts))
        _print("host waits", device.read(waits))
    return code


def _print(title: str, tables: Mapping[int, Mapping[str, int]]) -> None:
    print("\n" + "".join(f"{f'rank {rank}':>16}" for rank in tables) + f"  {title}")
    for name in sorted(set().union(*tables.values())):
        print("".join(f"{table.get(name, 0):16,}" for table in tables.values()) + f"  {name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

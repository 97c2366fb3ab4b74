"""What can be shown of CUDA without a GPU, on a device that computes nothing (docs/null-gpu.md).

hatch run null-gpu                                   # all campaigns, then their pages under docs/
hatch run null-gpu tests                             # one of them
hatch run null-gpu run --ranks 2 -- forge-train run job.toml --parallel.tp=2     # anything
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.null_gpu import device

# name: module with `main(arguments: list[str]) -> int`
CAMPAIGNS = {
    "tests": "tests.null_gpu.test_device",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hatch run null-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", metavar="{" + ",".join([*CAMPAIGNS, "run"]) + "}")
    for name, module in CAMPAIGNS.items():
        campaign = verbs.add_parser(name, help=f"{module}; its own flags follow", add_help=False)
        campaign.set_defaults(module=module)
    command = verbs.add_parser("run", help="a command on the null GPU; prints counts and host waits at its end")  # fmt: skip
    command.add_argument("--ranks", type=int, default=1, help="processes, with a device each")
    command.add_argument("--memory-gib", type=float, help="memory of a device (139.8)")
    command.add_argument("command", nargs="+", help="after --")
    given, rest = parser.parse_known_args(argv)
    if given.verb == "run":
        return _run([*given.command, *rest], given.ranks, given.memory_gib)
    if reason := device.why_not():
        sys.exit(f"no null GPU: {reason}")
    if given.verb:
        return importlib.import_module(given.module).main(rest)
    failed = [name for name, module in CAMPAIGNS.items() if importlib.import_module(module).main([])]  # fmt: skip
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _run(command: list[str], ranks: int, memory_gib: float | None) -> int:
    with tempfile.TemporaryDirectory() as folder:
        waits, counts = Path(folder, "waits"), Path(folder, "counts")
        try:
            variables = device.environment(devices=ranks, waits=waits, counts=counts, memory_gib=memory_gib)  # fmt: skip
        except device.Unavailable as error:
            sys.exit(f"no null GPU: {error}")
        code = subprocess.call(device.launched(command, ranks), env={**os.environ, **variables})
        for title, tables in (("counts", device.read(counts)), ("host waits", device.read(waits))):
            _print(title, tables)
    return code


def _print(title: str, tables: Mapping[int, Mapping[str, int]]) -> None:
    print(f"\n{title}" + "".join(f"{f'rank {rank}':>16}" for rank in tables))
    for name in sorted(set().union(*tables.values())):
        print("".join(f"{table.get(name, 0):16,}" for table in tables.values()) + f"  {name}")


if __name__ == "__main__":
    sys.exit(main())

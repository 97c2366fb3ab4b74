"""Routing scenarios x backends x dispatchers: time, memory, and the error against a loop in float64.

    cd packages/forge-moe/benchmarks
    python routing_lab.py                                  # one process, all scenarios and backends
    python routing_lab.py --ranks 4 --scenarios hot_rank   # four gloo processes on this machine

Exit code 0 if every cell is exact within its bound, 1 if one is not, 2 for wrong arguments.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lab_cell import Cell, Settings, run_cell
from routing_scenarios import SCENARIOS
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

BACKENDS = ("grouped_mm", "loop", "batched")
DISPATCHERS = ("all_to_all", "hierarchical")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the lab; see the module's docstring."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.ranks > 1 and given.device != "cpu":
        parser.error(
            f"--ranks {given.ranks} must go with --device cpu; ranks on one machine use gloo"
        )
    settings = Settings(**{f.name: getattr(given, f.name) for f in fields(Settings)})
    with tempfile.TemporaryDirectory() as folder:
        if given.ranks == 1:
            found, refused = _measure(given, settings, None)
        else:
            spawn(_worker, (given, settings, folder), given.ranks)
            found, refused = json.loads((Path(folder) / "cells").read_text())
            found = [Cell(**cell) for cell in found]
    if given.json:
        threads = torch.get_num_threads() if given.ranks == 1 else 1
        line = {"lab": "moe", "ranks": given.ranks, "threads": threads}
        rows = {"cells": [asdict(cell) for cell in found], "refused": refused}
        print(json.dumps({**line, "torch": torch.__version__, **asdict(settings), **rows}))
    else:
        _print(found, refused)
    return 0 if all(cell.exact for cell in found) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="routing_lab.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for f in fields(Settings):
        parser.add_argument(
            "--" + f.name.replace("_", "-"), type=type(f.default), default=f.default
        )
    parser.add_argument("--scenarios", nargs="+", choices=[*SCENARIOS], default=[*SCENARIOS])
    backends = (*BACKENDS, "auto", "float8")
    parser.add_argument("--backends", nargs="+", choices=backends, default=[*BACKENDS])
    parser.add_argument(
        "--dispatchers",
        nargs="+",
        choices=DISPATCHERS,
        default=["all_to_all"],
        help="with several ranks; one process has 'local'",
    )
    parser.add_argument("--ranks", type=int, default=1, help="gloo processes on this machine")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    return parser


def _measure(given: Any, settings: Settings, mesh: Any) -> tuple[list[Cell], list[str]]:
    """All cells, and a line for each that the layer refuses."""
    dispatchers = given.dispatchers if mesh is not None else ["local"]
    found, refused = [], []
    for scenario, backend, dispatcher in product(given.scenarios, given.backends, dispatchers):
        try:
            found.append(run_cell(settings, scenario, backend, dispatcher, mesh))
        except ValueError as error:
            refused.append(f"{scenario}, {backend}, {dispatcher}: {error}")
    return found, refused


def _worker(rank: int, given: Any, settings: Settings, folder: str) -> None:
    torch.set_num_threads(1)
    meet = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=given.ranks)
    try:
        mesh = init_device_mesh("cpu", (given.ranks,), mesh_dim_names=("ep",))
        found, refused = _measure(given, settings, mesh)
        if rank == 0:
            text = json.dumps([[asdict(cell) for cell in found], refused])
            (Path(folder) / "cells").write_text(text)
    finally:
        dist.destroy_process_group()


def _print(found: list[Cell], refused: list[str]) -> None:
    head = ("scenario", "backend", "dispatcher", "load", "ms", "worst ms", "peak MiB", "error")
    print("{:<12} {:<10} {:<12} {:>5} {:>8} {:>8} {:>8} {:>9}".format(*head))
    for c in found:
        print(
            f"{c.scenario:<12} {c.backend:<10} {c.dispatcher:<12} {c.load:>5.2f} "
            f"{c.milliseconds:>8.2f} {c.slowest_step:>8.2f} {c.peak_mib:>8.2f} {c.error:>9.1e}"
            + ("" if c.exact else "  WRONG")
        )
    for line in refused:
        print(f"refused: {line}")


if __name__ == "__main__":
    sys.exit(main())

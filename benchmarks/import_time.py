"""What importing a package costs beside plain torch: seconds and modules, each in a fresh process.

    python benchmarks/import_time.py

Prints one JSON line. `extra` are modules that plain torch does not load and the package's own are
not among: it should be empty, or standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import harness
import torch

PACKAGES = (
    "forge_core",
    "forge_parallel",
    "forge_data",
    "forge_ckpt",
    "forge_resilience",
    "forge_moe",
    "forge_vlm",
)

PROBE = """
import json, sys, time
start = time.perf_counter()
__import__(sys.argv[1])
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted(sys.modules)]))
"""


def probe(name: str) -> tuple[float, set[str]]:
    """Seconds and modules of one import in a process of its own."""
    path = os.pathsep.join(p for p in sys.path if p.endswith("src"))
    done = subprocess.run(
        [sys.executable, "-c", PROBE, name],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, modules = json.loads(done.stdout)
    return seconds, set(modules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    names = ("torch", *PACKAGES)
    modules = {name: probe(name)[1] for name in names}  # also fills the file cache
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(args.rounds):
        for name in names if index % 2 else reversed(names):
            seconds[name].append(probe(name)[0])
    results: dict[str, Any] = {}
    for name in names:
        extra = modules[name] - modules["torch"]
        roots = {module.partition(".")[0] for module in extra} - {name}
        results[name] = {
            "seconds": harness.spread(seconds[name]),
            "modules": len(modules[name]),
            "own_modules": len([m for m in extra if m.partition(".")[0] == name]),
            "extra_modules": len([m for m in extra if m.partition(".")[0] != name]),
            "extra": sorted(root for root in roots if root not in sys.stdlib_module_names),
        }
    harness.emit("import_time", torch.device("cpu"), settings=vars(args), results=results)


if __name__ == "__main__":
    main()

"""Save and load against torch.save and plain dcp, back to back on one directory; prints one JSON line.

    python packages/forge-ckpt/benchmarks/save_load.py --gigabytes 1 --repeats 3 --dir /scratch

GB/s are 1e9 bytes of tensors per second of wall clock, medians over the repeats with (min, max).
Every save ends with fsync (``forge`` does it, for the others ``os.sync`` is inside the clock).
Loads come from the page cache unless the state is larger than it.
"""

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from forge_ckpt import Store

Tensors = dict[str, torch.Tensor]


def make_state(size: int) -> Tensors:
    """``size`` bytes in fp32 tensors of 16 MiB and a few small ones, as a model with moments has."""
    generator = torch.Generator().manual_seed(0)
    big = max(1, size // 2**24)
    state = {f"w{i}": torch.randn(2**22, generator=generator) for i in range(big)}
    return state | {f"b{i}": torch.randn(1000, generator=generator) for i in range(64)}


def forge_save(path: Path, state: Tensors) -> None:
    with Store(path) as store:
        store.save(1, {"x": state})


def forge_load(path: Path, state: Tensors) -> None:
    with Store(path, read_only=True) as store:
        store.load({"x": state})


def torch_save(path: Path, state: Tensors) -> None:
    path.mkdir()
    torch.save(state, path / "state.pt")
    os.sync()


def torch_load(path: Path, state: Tensors) -> None:
    found = torch.load(path / "state.pt", weights_only=True)
    for name, tensor in state.items():
        tensor.copy_(found[name])


def dcp_save(path: Path, state: Tensors) -> None:
    dcp.save({"x": state}, checkpoint_id=path)
    os.sync()


def dcp_load(path: Path, state: Tensors) -> None:
    dcp.load({"x": state}, checkpoint_id=path)


CONTENDERS: dict[str, tuple[Callable[[Path, Tensors], None], Callable[[Path, Tensors], None]]] = {
    "forge": (forge_save, forge_load),
    "torch": (torch_save, torch_load),
    "dcp": (dcp_save, dcp_load),
}


def seconds(run: Callable[[Path, Tensors], None], path: Path, state: Tensors) -> float:
    gc.collect()
    os.sync()
    start = time.perf_counter()
    run(path, state)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--dir", type=Path, default=None, help="where to write (default: temporary)"
    )
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    state = make_state(int(args.gigabytes * 1e9))
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    rates: dict[str, list[float]] = {}
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        for repeat in range(args.repeats):
            order = list(CONTENDERS)
            for name in order[repeat % 3 :] + order[: repeat % 3]:  # nobody is always first
                save, load = CONTENDERS[name]
                path = folder / f"{name}-{repeat}"
                rates.setdefault(f"{name}_save", []).append(size / 1e9 / seconds(save, path, state))
                rates.setdefault(f"{name}_load", []).append(
                    size / 1e9 / seconds(load, path, target)
                )
                assert all(torch.equal(target[key], state[key]) for key in state), name
                shutil.rmtree(path)
    finally:
        shutil.rmtree(folder)
    row = {
        name: [round(f(values), 3) for f in (statistics.median, min, max)]
        for name, values in rates.items()
    }
    where = {"torch": torch.__version__, "cpus": os.cpu_count(), "machine": platform.machine()}
    print(json.dumps({"benchmark": "save_load", "bytes": size, "gb_per_s": row, **where}))


if __name__ == "__main__":
    main()

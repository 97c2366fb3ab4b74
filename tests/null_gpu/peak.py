"""Jobs of a few steps, for the allocator's peaks: a process on the null GPU that memory.py talks to.

Each line on stdin is a job, {"config", "flags", "ranks", "saves"}; each line on stdout its result, {"peak", "reserved",
"torch"}, in bytes of the fullest rank, or {"error"}. Ranks are forks of this process, which has imported everything and touched no
device. Weights get no values, and nothing is saved unless `saves`: both take minutes for a large model and no
memory of the device beside that of a step.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from forge_ckpt import Store
from forge_parallel import launch
from forge_train import load_job
from forge_train.loop import assemble
from forge_train.loop.trainer import Trainer


def main() -> None:
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(json.loads(line), Path(folder))), flush=True)


def measure(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the ranks of a job to their end, or until one of them fails."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = {_start(job, rank, port, folder): rank for rank in range(job["ranks"])}
    failed: int | None = None
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if status and failed is None:
            failed = rank
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    if failed is not None:
        lines = (folder / f"{failed}.log").read_text(errors="replace").splitlines()
        return {"error": "\n".join(lines[-15:])}
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(job["ranks"])]
    largest = {kind: max(row[kind] for row in found) for kind in ("peak", "reserved")}
    return {**largest, "torch": torch.__version__}


def _start(job: dict[str, Any], rank: int, port: int, folder: Path) -> int:
    """Fork a rank; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    if job["ranks"] > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
                       "WORLD_SIZE": str(job["ranks"]), "LOCAL_WORLD_SIZE": str(job["ranks"])}  # fmt: skip
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        peaks = _train(job, folder)
        (folder / f"{rank}.json").write_text(json.dumps(peaks))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # not through what the parent would do at its end


def _train(job: dict[str, Any], folder: Path) -> dict[str, int]:
    """The allocator's peaks of this rank."""
    assemble.initialize = _nothing  # type: ignore[assignment]
    if not job["saves"]:
        Store.prepare = _nothing  # type: ignore[assignment, method-assign]
    flags = {**job["flags"], "run.dir": str(folder / "run"), "health.at_start": False}
    trainer = Trainer(load_job(job["config"], flags), saves=job["saves"])
    with launch(trainer.config.parallel) as meshes:
        trainer.fit(meshes)
        found = torch.cuda.memory_stats()
    return {
        "peak": found["allocated_bytes.all.peak"],
        "reserved": found["reserved_bytes.all.peak"],
    }


def _nothing(*_: Any, **__: Any) -> None:
    pass


if __name__ == "__main__":
    main()

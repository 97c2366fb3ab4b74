"""One supervisor on each node of a Slurm step: a hang ends the step everywhere, and the script starts it again."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_resilience.journal import read_events

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

_TRAIN = """
import os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
from forge_resilience.heartbeat import Heartbeat
heartbeat = Heartbeat.from_environ()
here, rank = Path(sys.argv[1]), int(os.environ["RANK"])
dist.init_process_group("gloo")
total = torch.zeros(1)
for step in range(1, 9):
    heartbeat.enter("step", step)
    if (step, rank) == (5, 3) and not (here / "hung").exists():
        (here / "hung").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    part = torch.tensor([float(step * rank)])
    dist.all_reduce(part)
    total += part
heartbeat.enter("exit")
with (here / "sums").open("a") as file:
    file.write(f"{rank} {os.environ['LOCAL_RANK']} {dist.get_world_size()} {total.item():g}\\n")
os._exit(0)
"""


def test_supervisors_of_two_nodes_name_the_stopped_rank_and_the_step_starts_again(
    slurm: Any,
) -> None:
    folder: Path = slurm.folder / "supervised"
    folder.mkdir()
    (folder / "train.py").write_text(_TRAIN)
    python = sys.executable
    step = (
        "srun -K --nodes=2 --ntasks-per-node=1 --wait=30 "
        f"{python} -m forge_resilience.supervise --nproc=2 --step_seconds=3 --first_step_seconds=60 "
        f"--journal={folder}/events.jsonl -- {python} {folder}/train.py {folder}"
    )
    (folder / "job.sh").write_text(
        f"#!/bin/bash\nexport OMP_NUM_THREADS=1\n{step} || {{ echo again $?; {step}; }}\necho ended $?\n"
    )
    slurm.submit("--nodes=2", "--ntasks=2", f"--output={folder}/out", folder / "job.sh")
    said = (folder / "out").read_text()
    # 75 where srun's TERM reached the other supervisor before it had judged: ranks that were asked to stop
    assert re.search(r"^again (1|75)$", said, re.MULTILINE), said
    assert said.endswith("ended 0\n"), said

    hangs = [e for e in read_events(folder / "events.jsonl") if e["event"] == "hang"]
    assert 3 in [e["rank"] for e in hangs]
    waiting = [
        e["cause"] for e in hangs if e["rank"] in (0, 1)
    ]  # the other node knows that it waits
    assert all("supervisor: phase step, step 5" in cause for cause in waiting)
    assert re.search(r"rank 3 is late: phase step, step 5, .*\bSIGSTOP\b", said)
    assert not any(e["event"] == "restart" for e in read_events(folder / "events.jsonl"))
    lines = sorted((folder / "sums").read_text().splitlines())
    assert lines == [f"{rank} {rank % 2} 4 216" for rank in range(4)]

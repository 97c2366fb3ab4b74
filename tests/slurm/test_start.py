"""Steps of a real Slurm: ranks over two nodes, a script without srun, requeues, arrays."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# Says which world it finds. The package's own __init__, which imports torch, is left out: a task that
# only looks costs a twentieth.
_LOOK = """
import importlib.util, json, sys, types
from dataclasses import asdict
(root,) = importlib.util.find_spec("forge_parallel").submodule_search_locations
for name, path in (("forge_parallel", root), ("forge_parallel.start", root + "/start")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from forge_parallel.start.world import find_world
sys.stdout.write(json.dumps(asdict(find_world())) + "\\n")
"""
_MEET = """
import json, sys
from dataclasses import asdict
import torch, torch.distributed as dist
from forge_parallel.start import end_process_group, find_world, leave, start_process_group
world = find_world()
start_process_group(world, "cpu", start_timeout_seconds=60)
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
end_process_group()
sys.stdout.write(json.dumps(asdict(world) | {"sum": total.item()}) + "\\n")
leave(0)
"""


def submit(slurm: Any, name: str, script: str, *options: str) -> list[list[dict[str, Any]]]:
    """Run an sbatch script to its end; per run of it, what the tasks said, by rank.

    `$LOOK` and `$MEET` in the script start a task, `step` marks the output of one srun as done.
    """
    folder: Path = slurm.folder
    head = "#!/bin/bash\nexport OMP_NUM_THREADS=1\n"
    for variable, text in (("LOOK", _LOOK), ("MEET", _MEET)):
        (folder / f"{variable}.py").write_text(text)
        head += f"{variable}='{sys.executable} {folder}/{variable}.py'\n"
    (folder / f"{name}.sh").write_text(head + "step() { echo step; }\n" + script)
    out = folder / f"{name}.out"
    slurm.submit("--open-mode=append", f"--output={out}", *options, folder / f"{name}.sh")
    runs = [
        [json.loads(line) for line in part.splitlines() if line.startswith("{")]
        for part in out.read_text().split("step\n")[:-1]
    ]
    return [sorted(run, key=lambda said: said["rank"]) for run in runs]


def test_a_step_over_two_nodes_forms_a_group_and_a_script_without_srun_is_one_process(slurm):
    script = "srun --distribution=block $MEET; step\n$LOOK; step\n"
    run, alone = submit(slurm, "group", script, "--nodes=2", "--ntasks=3")
    assert [said["rank"] for said in run] == [0, 1, 2]
    assert [said["sum"] for said in run] == [6.0] * 3
    assert {said["world_size"] for said in run} == {3}
    assert sorted(said["local_world_size"] for said in run) == [1, 2, 2]
    assert {said["launcher"] for said in run} == {"slurm"}
    assert {said["address"] for said in run} == {"127.0.0.1"}  # n1's, asked of Slurm
    assert len({said["port"] for said in run}) == 1
    assert [(said["world_size"], said["launcher"]) for said in alone] == [(1, "none")]


def test_F64_steps_requeues_and_elements_of_an_array_have_their_own_ports(slurm):
    """And all ranks of one step the same. SLURM_RESTART_COUNT is unset until the first requeue."""
    script = """
srun --ntasks=2 $LOOK; step
srun --ntasks=2 $LOOK; step
if [ -z "$SLURM_RESTART_COUNT" ]; then scontrol requeue $SLURM_JOB_ID; sleep 60; fi
"""
    runs = submit(slurm, "ports", script, "--ntasks=2", "--array=1-2%1", "--requeue")
    ports = [{said["port"] for said in run} for run in runs]
    assert [len(each) for each in ports] == [1] * 8  # 2 steps x 2 starts x 2 elements
    assert len(set.union(*ports)) == 8

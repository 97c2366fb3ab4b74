"""Which rank this process is: every launcher's variables, and environments that contradict themselves."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import forge_parallel.start
from forge_parallel.start import StartError, World, find_world
from forge_parallel.start.rendezvous import format_ranks, mismatches
from forge_parallel.start.world import tasks_per_node
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

RANKS = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
# task 3 of `srun -N2 -n4` in job 812, as Slurm 22.05 sets it (numbers of the job differ on purpose)
STEP = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_NODELIST": "localhost,n2",
}
TASKS = "SLURM_STEP_TASKS_PER_NODE"
# the shell of `sbatch -n4`, and of its `salloc`: one process, whatever the job's size
BATCH = {"SLURM_JOB_ID": "812", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "world"),
    [
        ({}, World()),
        ({"WORLD_SIZE": "1"}, World()),
        (BATCH, World()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, World(launcher="environment")),
        (
            RANKS | {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            World(3, 4, 1, 2, "10.0.0.1", 29500, "torchrun"),
        ),
        (RANKS, World(3, 4, 0, 1, "10.0.0.1", 29500, "environment")),
        (
            RANKS | {"MASTER_ADDR": "localhost"},
            World(3, 4, 3, 4, "localhost", 29500, "environment"),
        ),
        (
            without(STEP | RANKS, "SLURM_LOCALID") | {"LOCAL_RANK": "0", "SLURM_LOCALID": "0"},
            World(3, 4, 0, 1, "10.0.0.1", 29500, "environment"),
        ),
        (STEP, World(3, 4, 0, 1, "localhost", 25684, "slurm")),
        (
            STEP | {"SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"},
            World(2, 4, 2, 3, "localhost", 25684, "slurm"),
        ),
        (
            STEP | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000", "WORLD_SIZE": "4"},
            World(3, 4, 0, 1, "10.0.0.9", 4000, "slurm"),
        ),
        (
            STEP | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_LOCALID": "3"},
            World(3, 4, 3, 4, "127.0.0.1", 25684, "slurm"),
        ),
        (  # the interactive step of salloc: one task, and the job has four
            STEP
            | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            World(launcher="slurm"),
        ),
    ],
)
def test_a_world_for_every_launcher(environ, world):
    assert find_world(environ) == world


@pytest.mark.parametrize(
    ("environ", "key", "value", "code"),
    [
        (without(RANKS, "WORLD_SIZE"), "WORLD_SIZE", ..., "missing"),
        (without(RANKS, "RANK"), "WORLD_SIZE", "4", "requires"),
        (without(RANKS, "MASTER_ADDR"), "MASTER_ADDR", ..., "missing"),
        (without(RANKS, "MASTER_PORT"), "MASTER_PORT", ..., "missing"),
        (RANKS | {"RANK": "4"}, "RANK", 4, "below"),
        (RANKS | {"RANK": "-1"}, "RANK", -1, "range"),
        (RANKS | {"RANK": "one"}, "RANK", "one", "type"),
        (RANKS | {"WORLD_SIZE": "0"}, "WORLD_SIZE", 0, "range"),
        (RANKS | {"MASTER_PORT": "70000"}, "MASTER_PORT", 70000, "below"),
        (RANKS | {"LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE", ..., "missing"),
        (RANKS | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK", 2, "below"),
        (RANKS | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE", 8, "world_size"),
        (STEP | {"WORLD_SIZE": "8"}, "WORLD_SIZE", "8", "mismatch"),
        (STEP | {"SLURM_PROCID": "4"}, "SLURM_PROCID", 4, "below"),
        (STEP | {TASKS: "2,x"}, TASKS, "2,x", "syntax"),
        (STEP | {TASKS: "2(x3)"}, TASKS, "2(x3)", "mismatch"),
        (STEP | {"SLURM_STEP_NODELIST": "n[1-2"}, "SLURM_STEP_NODELIST", "n[1-2", "syntax"),
    ],
)
def test_a_contradicting_environment_is_rejected(
    environ: dict[str, str], key: str, value: object, code: str
) -> None:
    with rejects(key, value, code):
        find_world(environ)


def test_finding_the_world_needs_no_torch():
    """A launcher or a task that only looks should not pay two seconds for an import."""
    folder = Path(forge_parallel.start.__file__).parent
    body = f"""
import sys, types
for name, path in (("forge_parallel", {str(folder.parent)!r}), ("forge_parallel.start", {str(folder)!r})):
    sys.modules[name] = types.ModuleType(name)  # without its __init__, which imports torch
    sys.modules[name].__path__ = [path]
from forge_parallel.start.world import find_world
assert find_world({{}}).world_size == 1
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", body], check=True, timeout=60)


def test_slurm_lists():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_F64_all_ranks_compute_one_port_and_a_requeue_another():
    """The port depends on nothing of a rank's own; job, step, array element and requeue move it."""

    def port(**changes: str) -> int:
        return find_world(STEP | changes).port

    own = {"SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}
    assert {port(SLURM_PROCID=str(rank), **own) for rank in range(4)} == {port()}
    moved = [
        port(),
        port(SLURM_RESTART_COUNT="1"),
        port(SLURM_RESTART_COUNT="2"),
        port(SLURM_STEP_ID="1"),
        port(SLURM_JOB_ID="813"),  # also the next element of an array
    ]
    assert len(set(moved)) == len(moved)
    assert all(20000 <= number < 32768 for number in moved)  # below the ephemeral ports
    assert port(MASTER_PORT="4000", SLURM_RESTART_COUNT="1") == 4000


def test_differences_name_the_first_rank_and_both_values():
    def one(host: str, gpu: str | None = None, **facts: str) -> dict:
        return {"host": host, "device": "cuda:0", "gpu": gpu, "facts": facts}

    assert mismatches({0: one("a", torch="2.13"), 1: one("b", torch="2.13")}) == []
    (older,) = mismatches({0: one("a", torch="2.13"), 1: one("a", torch="2.13"), 3: one("b")})
    assert_problem(StartError([older]), "torch", None, "differs")
    assert {"3", "a", "b", "2.13"} <= set(re.findall(r"[\w.]+", older.rule))
    (unknown,) = mismatches({0: one("a", torch="2.13"), 2: one("b", torch="2.13", nccl="2.29")})
    assert_problem(StartError([unknown]), "nccl", "2.29", "differs")
    assert {"2", "b"} <= set(re.findall(r"[\w.]+", unknown.rule))
    (same,) = mismatches({0: one("a", "GPU-1"), 1: one("a", "GPU-2"), 2: one("a", "GPU-1")})
    assert_problem(StartError([same]), "gpu", "GPU-1", "duplicate")
    assert {"0", "2", "a", "cuda"} <= set(re.findall(r"\w+", same.rule))


def test_ranks_are_listed_briefly():
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([2, 3]) == "ranks 2, 3"
    assert format_ranks(list(range(20))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"

"""A rank of three is killed at every one of its disk calls of a save: the others raise, one loads."""

import subprocess
import sys

import pytest

# Runs in a process of its own, with one thread: it forks three ranks for each point. The victim
# counts calls that touch the disk and dies before the n-th, or, past the last, when save returned.
_CRASH = """
import os, shutil, signal, sys, time
import torch, torch.distributed as dist
import torch._dynamo  # a DTensor imports it: once here, instead of 0.5 s in every rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from forge_ckpt import Store
from forge_ckpt.rank_group import LOST_RANKS
torch.set_num_threads(1)
folder, victim, world = sys.argv[1], int(sys.argv[2]), 3
root = folder + "/store"
CALLS = ("mkdir", "open", "pwrite", "fsync", "rename", "unlink", "rmdir")
RETURNED, LOST, OTHER = 0, 10, 11

def state(step, mesh):
    full = torch.arange(40.0) + step
    return {"w": full if mesh is None else distribute_tensor(full, mesh, [Shard(0)]), "n": step}

def rank(number, point, name):
    dist.init_process_group("gloo", store=dist.FileStore(name, world), rank=number, world_size=world)
    made = state(3, init_device_mesh("cpu", (world,)))
    calls = 0
    def wrap(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    with Store(root, keep_last=2) as store:
        if number == victim:
            for name in CALLS:
                setattr(os, name, wrap(getattr(os, name)))
        try:
            store.save(3, made)
        except RuntimeError as error:
            if LOST_RANKS in str(error):
                return LOST
            raise
        if number == victim and calls < point:
            os.kill(os.getpid(), signal.SIGKILL)
        return RETURNED

def fork(number, point, name):
    pid = os.fork()
    if pid == 0:
        code = OTHER
        try:
            code = rank(number, point, name)
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid

point, done, kinds = 0, False, set()
while not done:
    point += 1
    shutil.rmtree(root, ignore_errors=True)
    with Store(root, keep_last=2) as store:
        for step in (1, 2):
            store.save(step, state(step, None))
    began = time.monotonic()
    pids = [fork(number, point, f"{folder}/group-{point}") for number in range(world)]
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert time.monotonic() - began < 60, "survivors learn of a death at once"
    assert ends[victim] == -signal.SIGKILL, ends
    assert set(ends) <= {-signal.SIGKILL, RETURNED, LOST}, ends
    left = any(".tmp-" in n for n in os.listdir(root))
    there = os.path.exists(root + "/step-00000003")
    kinds.add((left, there, RETURNED in ends))
    got = state(0, None)
    with Store(root, keep_last=2) as store:
        assert not [n for n in os.listdir(root) if ".tmp-" in n], "left-overs are removed"
        step = store.load(got)
        assert step == (3 if there else 2) and got["n"] == step, (point, step)
        assert torch.equal(got["w"], torch.arange(40.0) + step), (point, step)
        assert there or RETURNED not in ends, "a rank returned from a save that is not on disk"
        assert not os.path.exists(root + "/quarantine"), "a crash is no corruption"
    done = ends.count(RETURNED) == world - 1  # killed after the save
print(point, sorted(kinds))
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("victim", "calls"), [(0, 12), (2, 3)])
def test_F53_a_rank_killed_at_every_disk_call_of_a_save(tmp_path, victim, calls):
    command = [sys.executable, "-W", "ignore", "-c", _CRASH, str(tmp_path), str(victim)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    points, kinds = run.stdout.split(maxsplit=1)
    assert int(points) > calls, "mkdir, files, syncs, rename, and the removal of the oldest"
    if victim == 0:  # (a temporary directory is left, the step exists, a rank's save returned)
        assert "(True, False, False)" in kinds, "died before the commit"
        assert "(False, True, False)" in kinds, "died after the commit, before its word"
    else:
        assert "True)" in kinds

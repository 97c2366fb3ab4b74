"""Two ranks save step 3 after steps 1 and 2, and something happens to one of them; a script of test_fault_matrix.

    python fault_matrix.py FOLDER kill|io|some SYNC VICTIM [CASE ...]

Runs in a process of its own, with one thread: it forks the ranks of each case, in which named functions
are replaced, and looks at what they leave. Prints a line per case: name, how the ranks ended, newest step.
"""

import errno
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # a DTensor imports it: once here, instead of 0.5 s in every rank
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import forge_ckpt.directories
import forge_ckpt.read.load
import forge_ckpt.retention
import forge_ckpt.write.blocks
import forge_ckpt.write.saver
import forge_ckpt.write.staging
import forge_ckpt.write.writer
from forge_ckpt import CorruptCheckpoint, Store
from forge_ckpt.rank_group import LOST_RANKS

WORLD = 2
RETURNED, LOST, FAILED, CORRUPT, OTHER = 0, 10, 11, 12, 20


def state_of(step, mesh=None):
    full = torch.arange(40.0) + step
    tensor = full if mesh is None else distribute_tensor(full, mesh, [Shard(0)])
    return {"w": tensor, "same": torch.full((9,), float(step)), "n": step}


def check(state, step):
    """Every tensor is that of ``step``."""
    w = state["w"].full_tensor() if hasattr(state["w"], "full_tensor") else state["w"]
    assert torch.equal(w, torch.arange(40.0) + step), (step, w)
    assert torch.equal(state["same"], torch.full((9,), float(step))), (step, state)
    assert state["n"] == step, (step, state)


# ---- points at which a rank is killed


def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name):
    setattr(owner, name, die)


def after(owner, name):
    real = getattr(owner, name)

    def call(*args, **kwargs):
        real(*args, **kwargs)
        die()

    setattr(owner, name, call)


def _half_of_a_copy(owner, name):
    real = getattr(owner, name)
    setattr(owner, name, lambda pieces, *args: (real(pieces[:1], *args), die()))


def _half_of_a_write(owner, name):
    real = getattr(owner, name)
    setattr(owner, name, lambda fd, view, at: (real(fd, view[: len(view) // 2], at), die()))


def _half_of_a_removal(owner, name):
    setattr(owner, name, lambda path: (os.unlink(Path(path) / "data-0.bin"), die()))


saver, blocks = forge_ckpt.write.saver, forge_ckpt.write.blocks
retain, writer = forge_ckpt.retention, forge_ckpt.write.writer
folders = forge_ckpt.directories
BOTH, FIRST = (0, 1), (0,)
# name -> (how, owner, attribute, ranks that come there)
POINTS = {
    "before the plan": (before, saver.Saver, "_plan", BOTH),
    "after the plan": (after, saver, "plan_save", BOTH),
    "while staging": (_half_of_a_copy, forge_ckpt.write.staging, "_copy", BOTH),
    "after staging": (after, saver.Saver, "_stage", BOTH),
    "while writing": (_half_of_a_write, blocks, "write_at", BOTH),
    "after the fsync of its file": (after, blocks.BlockFile, "finish", BOTH),
    "before the manifest": (before, writer.ForgeWriter, "finish", FIRST),
    "after the manifest": (before, folders.atomic, "sync_folder", FIRST),
    "before the rename": (before, folders, "commit", FIRST),
    "after the rename": (before, folders, "sync_folder", FIRST),
    "after the commit": (before, retain.Retention, "apply", BOTH),
    "while reading back": (before, forge_ckpt.read.load, "verify_files", BOTH),
    "before the removal": (before, retain.Retention, "remove", FIRST),
    "while removing": (_half_of_a_removal, folders, "remove", FIRST),
    "after the removal": (after, retain.Retention, "apply", BOTH),
    "while loading": (before, forge_ckpt.read.load.ForgeReader, "stage", BOTH),
    "while filling": (before, forge_ckpt.read.load, "fill", BOTH),
    "before setting aside": (before, folders, "quarantine", FIRST),
    "while setting aside": (before, folders, "sync_folder", FIRST),
    "after setting aside": (after, folders, "quarantine", FIRST),
}
ASYNC_ONLY = {"while staging", "after staging"}
ASIDE = {"before setting aside", "while setting aside", "after setting aside"}  # step 3 is damaged
LOADING = {"while loading", "while filling", *ASIDE}


# ---- errors of the file system: FORGE_FAULT for io_faults.c, what the save does

EIO, ENOSPC = errno.EIO, errno.ENOSPC
# name -> (fault, how all ranks' saves end, steps that may be the newest after it, ranks)
FAULTS = {
    "mkdir ENOSPC": (f"mkdir step-00000003.tmp {ENOSPC}", FAILED, {2}, FIRST),
    "write ENOSPC": (f"pwrite data-{{rank}}.bin$ {ENOSPC}", FAILED, {2}, BOTH),
    "write EIO": (f"pwrite data-{{rank}}.bin$ {EIO}", FAILED, {2}, BOTH),
    "write of the manifest ENOSPC": (f"pwrite manifest.json$ {ENOSPC}", FAILED, {2}, FIRST),
    "fsync EIO": (f"fsync data-{{rank}}.bin$ {EIO}", FAILED, {2}, BOTH),
    "fsync of the manifest EIO": (f"fsync manifest.json$ {EIO}", FAILED, {2}, FIRST),
    "fsync of the directory EIO": (f"fsync .tmp- {EIO}", FAILED, {2}, FIRST),
    "fsync above EIO": (f"fsync /store$ {EIO}", FAILED, {3}, FIRST),
    "close EIO": (f"close data-{{rank}}.bin$ {EIO}", FAILED, {2}, BOTH),
    "close of the manifest EIO": (f"close manifest.json$ {EIO}", FAILED, {2}, FIRST),
    "rename EIO": (f"rename step-00000003.tmp {EIO}", FAILED, {2}, FIRST),
    "read back EIO": (f"preadv step-00000003/data- {EIO}", CORRUPT, {2}, BOTH),
    "rename of an old step EIO": (f"rename step-00000001$ {EIO}", RETURNED, {3}, FIRST),
    "removal EIO": (f"unlinkat step-00000001 {EIO}", RETURNED, {3}, FIRST),
    "limit 0": (resource.RLIMIT_FSIZE, FAILED, {2}, BOTH),
    "limit 100": (resource.RLIMIT_FSIZE, FAILED, {2}, BOTH),
    "store removed": (shutil.rmtree, FAILED, set(), BOTH),
    "store moved": (lambda root: os.rename(root, f"{root}.away"), FAILED, set(), BOTH),
    "new step removed": (None, FAILED, {2}, BOTH),
}


def inject(name, root, rank):
    fault = FAULTS[name][0]
    if isinstance(fault, str):
        os.environ["FORGE_FAULT"] = fault.format(rank=rank)
    elif fault == resource.RLIMIT_FSIZE:
        limit = int(name.split()[1])
        resource.setrlimit(fault, (limit, resource.RLIM_INFINITY))
    else:  # in the middle of the write of its file
        real = blocks.write_at

        def write(fd, view, at):
            real(fd, view[: len(view) // 2], at)
            if fault is None:
                shutil.rmtree(next(Path(root).glob("step-00000003.tmp-*")), ignore_errors=True)
            else:
                fault(root)
            real(fd, view, at)

        blocks.write_at = write


def restore(real):
    os.environ.pop("FORGE_FAULT", None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    blocks.write_at = real


# ---- a case


def save(store, step, state, sync):
    """How it ended."""
    try:
        store.save(step, state, wait=sync)
        if not sync:
            state["w"].to_local().fill_(-1)  # the checkpoint holds what was there before
            state["same"].fill_(-1)
            store.wait()
        return RETURNED
    except CorruptCheckpoint:
        return CORRUPT
    except OSError:
        return FAILED


def rank_killed(number, case, root, sync, victim, mesh):
    with Store(root, keep_last=2) as store:
        save(store, 2, state_of(2, mesh), sync)  # the first makes the group of the writing threads
        if number == victim and case not in LOADING:
            how, owner, name, _ = POINTS[case]
            how(owner, name)
        try:
            ended = save(store, 3, state_of(3, mesh), sync)
            if case in LOADING:
                dist.barrier()
                if number == victim and case in ASIDE:
                    with open(Path(root, "step-00000003", "data-1.bin"), "r+b") as file:
                        file.write(b"\xff" * 8)
                if number == victim:
                    how, owner, name, _ = POINTS[case]
                    how(owner, name)
                store.load(state_of(0, mesh))
        except RuntimeError as error:
            if LOST_RANKS in str(error):
                return LOST
            raise
    return OTHER if number == victim else ended  # the victim never came there


def rank_failing(number, case, root, sync, victim, mesh):
    _, wanted, newest, _ = FAULTS[case]
    with Store(root, keep_last=2) as store:
        save(store, 2, state_of(2, mesh), sync)
        real = blocks.write_at
        if number == victim:
            inject(case, root, number)
        ended = save(store, 3, state_of(3, mesh), sync)
        restore(real)
        dist.barrier()
        if ended != wanted:
            return OTHER
        if not newest:  # the store is gone: no later save may go anywhere else
            assert save(store, 4, state_of(4, mesh), sync) == FAILED
            assert not os.path.exists(root)
            return ended
        back = state_of(0, mesh)
        step = store.load(back)
        assert step in newest, step
        check(back, step)
        # it goes on; the step that failed may be saved again
        for later in [3, 4] if ended == FAILED else [4]:
            assert save(store, later, state_of(later, mesh), sync) == RETURNED, later
            assert store.load(back) == later
            check(back, later)
    return ended


def fork(number, run, name, *args):
    pid = os.fork()
    if pid == 0:
        code = OTHER
        try:
            group = dist.FileStore(name, WORLD)
            dist.init_process_group("gloo", store=group, rank=number, world_size=WORLD)
            code = run(number, *args, init_device_mesh("cpu", (WORLD,)))
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def after_kill(case, ends, root, victim):
    assert ends[victim] == -signal.SIGKILL, ends
    assert set(ends) <= {-signal.SIGKILL, RETURNED, LOST}, ends
    if case in ASIDE:
        aside = os.path.exists(root / "quarantine" / "step-00000003-0")
        assert aside != os.path.exists(root / "step-00000003"), "in one place"
        return 2
    there = os.path.exists(root / "step-00000003")
    assert there or RETURNED not in ends, (case, ends)
    committed = list(POINTS).index(case) >= list(POINTS).index("after the rename")
    assert there == committed or POINTS[case][3] != FIRST, (case, there)
    return 3 if there else 2


def main():
    torch.set_num_threads(1)
    folder, kind, sync, victim = (
        Path(sys.argv[1]),
        sys.argv[2],
        sys.argv[3] == "sync",
        int(sys.argv[4]),
    )
    table = {"kill": POINTS, "io": FAULTS, "some": {**POINTS, **FAULTS}}[kind]
    names = sys.argv[5:] or [name for name, row in table.items() if victim in row[3]]
    folder.mkdir(exist_ok=True)
    original = folder / "original"
    with Store(original, keep_last=2) as store:
        store.save(1, state_of(1))
    for number, case in enumerate(names):
        if sync and case in ASYNC_ONLY:
            continue
        root = folder / f"{number}" / "store"
        shutil.copytree(original, root)
        began = time.monotonic()
        run = rank_killed if case in POINTS else rank_failing
        arguments = (run, f"{folder}/group-{number}", case, str(root), sync, victim)
        pids = [fork(rank, *arguments) for rank in range(WORLD)]
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert time.monotonic() - began < 60, f"{case}: survivors learn of a death at once"
        if case in POINTS:
            newest = after_kill(case, ends, root, victim)
        else:
            assert ends == [FAULTS[case][1]] * WORLD, (case, ends)
            newest = 4 if FAULTS[case][2] else None
        away = Path(f"{root}.away")
        root, newest = (away, 2) if away.exists() else (root, newest)
        if newest is not None:
            found = state_of(0)
            with Store(root, keep_last=2) as store:
                assert not [n for n in os.listdir(root) if ".tmp-" in n], "left-overs are removed"
                assert store.load(found) == newest, (case, newest)
                check(found, newest)
                for step in store.steps():
                    store.verify(step)
                quarantine = case == "read back EIO" or case in ASIDE
                assert os.path.exists(root / "quarantine") == quarantine, case
                store.save(5, state_of(5))
                assert store.load(found) == 5
        print(case, *ends, newest, sep="\t", flush=True)


if __name__ == "__main__":
    main()

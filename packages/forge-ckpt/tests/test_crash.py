"""A writer that dies, or a disk that is full, at every point of a save: one checkpoint loads."""

import errno
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from disk_calls import record_calls

from forge_ckpt import Store

pytestmark = pytest.mark.lane("test")

# Runs in a process of its own, with one thread: it forks a child per crash point. The child counts
# calls that touch the disk and dies before or after the n-th; the parent then loads.
_CHILD = """
import os, shutil, signal, sys
import torch
from forge_ckpt import Store
torch.set_num_threads(1)
root, mode = sys.argv[1:]
CALLS = ("mkdir", "open", "pwrite", "fsync", "rename", "unlink", "rmdir")

def state(step):
    return {"w": torch.full((1000,), float(step)), "n": step}

def child(point, steps):
    calls = 0
    def wrap(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            mine = calls
            if mine == point and mode == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*args, **kwargs)
            finally:
                if mine == point and mode == "after":
                    os.kill(os.getpid(), signal.SIGKILL)
        return call
    with Store(root, keep_last=2) as store:
        for name in CALLS:
            setattr(os, name, wrap(getattr(os, name)))
        for step in steps:
            store.save(step, state(step))

def points(steps, damage=lambda: None):
    # each call at which a process that saves `steps` after steps 1 and 2 was killed, and the first one after them
    point, done = 0, False
    while not done:
        point += 1
        shutil.rmtree(root, ignore_errors=True)
        with Store(root, keep_last=2) as store:
            store.save(1, state(1))
            store.save(2, state(2))
        damage()
        pid = os.fork()
        if pid == 0:
            child(point, steps)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        done = not os.WIFSIGNALED(status)
        assert done or os.WTERMSIG(status) == signal.SIGKILL, status
        yield point
"""
_CRASH = """
kinds = set()
for point in points((3,)):
    left = sorted(n for n in os.listdir(root) if ".tmp-" in n)
    kinds.add((bool(left), os.path.exists(root + "/step-00000003")))
    got = state(0)
    with Store(root, keep_last=2) as store:
        assert not [n for n in os.listdir(root) if ".tmp-" in n], "left-overs are removed"
        step = store.load(got)
        assert step in (2, 3) and got["n"] == step and bool((got["w"] == step).all()), (point, step)
        assert not os.path.exists(root + "/quarantine"), "a crash is no corruption"
        store.save(4, state(4))
        assert store.load(got) == 4
print(point, sorted(kinds))
"""


def killed(script, tmp_path, mode):
    """(number of kill points, kinds of what they left) as the script prints them."""
    command = [sys.executable, "-W", "ignore", "-c", _CHILD + script, str(tmp_path / "store"), mode]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    points, kinds = run.stdout.strip().split(maxsplit=1)
    return points, kinds


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["before", "after"])
def test_F53_killed_at_every_disk_call_one_checkpoint_loads(tmp_path, mode):
    points, kinds = killed(_CRASH, tmp_path, mode)
    assert int(points) >= 15, "mkdir, two files, syncs, rename, and the removal of the oldest"
    # died with a temporary directory and no step; with the step; and while removing an old one
    assert kinds == "[(False, False), (False, True), (True, False), (True, True)]"


# Step 2 is damaged and saved again: the damaged one moves to quarantine, then the new one gets its name.
_AGAIN = """
def damage():
    with open(root + "/step-00000002/data-0.bin", "r+b") as file:
        file.write(b"damaged")

kinds = set()
for point in points((2,), damage):
    left = any(".tmp-" in n for n in os.listdir(root))
    moved = os.path.exists(root + "/quarantine/step-00000002-0")
    kinds.add((left, moved))
    got = state(0)
    with Store(root, keep_last=2) as store:
        assert not [n for n in os.listdir(root) if ".tmp-" in n], "left-overs are gone"
        step = store.load(got)
        assert step == (2 if moved else 1), (point, step)
        assert got["n"] == step and bool((got["w"] == step).all()), (point, step)
print(point, sorted(kinds))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["before", "after"])
def test_F53_killed_while_a_damaged_step_is_saved_again_the_new_copy_loads(tmp_path, mode):
    points, kinds = killed(_AGAIN, tmp_path, mode)
    assert int(points) >= 15
    # died before and after the damaged one had moved, with a copy and without
    assert kinds == "[(False, False), (False, True), (True, False), (True, True)]"


def test_a_copy_of_a_damaged_step_outlives_a_rename_that_fails(tmp_path, monkeypatch):
    real, state = os.rename, {"w": torch.ones(1000)}

    def fails(source, target):
        if os.path.basename(target) == "step-00000002":
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    with Store(tmp_path) as store:
        store.save(1, {"w": torch.zeros(1000)})
        store.save(2, state)
        (tmp_path / "step-00000002/data-0.bin").write_bytes(b"damaged")
        monkeypatch.setattr(os, "rename", fails)
        with pytest.raises(OSError, match="step 2 "):
            store.save(2, state)
    monkeypatch.undo()
    got = {"w": torch.zeros(1000)}
    with Store(tmp_path) as store:
        assert store.load(got) == 2
        assert torch.equal(got["w"], state["w"])


_FULL = """
import resource, sys
import torch
from forge_ckpt import Store
store = Store(sys.argv[1])
store.save(1, {"w": torch.ones(1000)})
got = {"w": torch.zeros(1000)}
for limit in (0, 100, 4096, 5_000_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        store.save(2, {"w": torch.full((3_000_000,), 2.0)})
    except OSError as error:
        print(type(error).__name__, error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert store.steps() == [1]
    assert store.load(got) == 1 and bool(got["w"].all())
store.save(2, {"w": torch.full((1000,), 2.0)})
assert store.load(got) == 2
"""


@pytest.mark.slow
def test_a_size_limit_is_an_error_and_the_old_checkpoint_stays(tmp_path):
    root = tmp_path / "store"
    command = [sys.executable, "-c", _FULL, str(root)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = run.stdout.splitlines()
    assert len(lines) == 4
    assert all(" step 2 " in line and "File too large" in line for line in lines)
    assert sorted(os.listdir(root)) == ["lock", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename", "mkdir"])
def test_a_full_disk_at_any_call(tmp_path, monkeypatch, call):
    with Store(tmp_path) as store:
        store.save(1, {"w": torch.ones(10)})

        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, call, full)
        with pytest.raises(OSError, match=r"step 2 .*No space left") as caught:
            store.save(2, {"w": torch.ones(10)})
        assert caught.value.errno == errno.ENOSPC
        monkeypatch.undo()
        assert sorted(os.listdir(tmp_path)) == ["lock", "step-00000001"]
        assert store.load({"w": torch.zeros(10)}) == 1


_OWNER = textwrap.dedent("""
    import os, sys, time
    from forge_ckpt import Store
    store = Store(sys.argv[1])
    if os.fork() == 0:           # a data worker that outlives its parent
        print("ready", flush=True)
        sys.stdin.read()
        os._exit(0)
    os.wait()
""")


@pytest.mark.slow
def test_the_lock_dies_with_its_owner_and_a_forked_worker_does_not_keep_it(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", _OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"ready\n"
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        Store(tmp_path).close()  # the worker is still alive: it reads a pipe that we hold open
        owner.stdin.close()


@pytest.fixture
def calls(monkeypatch):
    return record_calls(monkeypatch, ("mkdir", "fsync", "rename", "unlink"))


def test_a_step_is_on_the_disk_before_its_name_and_its_name_before_save_returns(tmp_path, calls):
    with Store(tmp_path) as store:
        calls.clear()
        store.save(1, {"w": torch.ones(3), "n": 1})
        (temporary,) = [path for call, path in calls if call == "rename"]
        assert calls == [
            ("mkdir", temporary),
            ("fsync", f"{temporary}/data-0.bin"),
            ("fsync", f"{temporary}/manifest.json"),
            ("fsync", temporary),
            ("rename", temporary),
            ("fsync", str(tmp_path)),
        ]


def test_a_new_store_is_on_the_disk_when_it_is_open(tmp_path, calls):
    root = tmp_path / "runs" / "a"
    Store(root).close()
    made = [("mkdir", str(root.parent)), ("mkdir", str(root))]
    assert calls[:2] == made
    assert sorted(calls[2:4]) == [("fsync", str(tmp_path)), ("fsync", str(root.parent))]
    calls.clear()
    Store(root).close()
    assert "fsync" not in dict(calls), "once"


def test_a_removed_step_has_lost_its_name_on_the_disk_before_its_files_go(tmp_path, calls):
    with Store(tmp_path) as store:
        for step in (1, 2):
            store.save(step, {"w": torch.ones(3)})
        calls.clear()
        store.discard_after(1)
    assert calls[:2] == [("rename", f"{tmp_path}/step-00000002"), ("fsync", str(tmp_path))]
    assert [name for name, _ in calls[2:4]] == ["unlink", "unlink"]

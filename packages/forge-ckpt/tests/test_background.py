"""Saves without waiting: what they hold, what they wait for, and what becomes of those that fail."""

import concurrent.futures
import errno
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import forge_ckpt.write.blocks
from forge_ckpt import (
    CorruptCheckpoint,
    Keep,
    SaveEvent,
    SaveHandle,
    StepExists,
    Store,
    directories,
)
from forge_ckpt._shared.atomic import remove
from forge_ckpt._shared.problems import Shown
from forge_testing import run_on_ranks
from forge_testing.disk import Disk
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

BLOCK = 4 * 2**20


@pytest.fixture
def disk():
    found = Disk()
    yield found
    found.restore()


def state_of(value):
    big = torch.full((BLOCK // 2 + 5,), float(value))  # two blocks and a bit
    return {"m": {"big": big, "tied": big, "odd": torch.full((3, 5), value).T, "n": value}}


def loaded(root):
    state = state_of(0)
    with Store(root, read_only=True) as store:
        step = store.load(state)
    found = {float(x) for x in state["m"]["big"].unique()} | set(
        state["m"]["odd"].unique().tolist()
    )
    assert found == {state["m"]["n"]}
    return step, state["m"]["n"]


def kinds(events):
    return [(event.kind, event.step) for event in events]


def test_F55_later_changes_are_not_in_the_checkpoint(tmp_path, disk):
    state, seen = state_of(1), []
    with Store(tmp_path, on_event=seen.append) as store:
        for value in (1, 2, 3):  # the staging memory of the first is used again
            state["m"]["big"].fill_(value)
            state["m"]["odd"].fill_(value)
            state["m"]["n"] = value
            disk.close()
            store.save(value, state, wait=False)
            for tensor in (state["m"]["big"], state["m"]["odd"]):
                tensor.fill_(-1)
            state["m"]["n"] = -1
            assert kinds(store.poll()) == [("staged", value)]
            assert value not in store.steps()
            disk.open()
            store.wait()
            assert kinds(store.poll()) == [("written", value), ("committed", value)]
            assert loaded(tmp_path) == (value, value)
    assert [event.kind for event in seen] == ["staged", "written", "committed"] * 3
    assert all(isinstance(event, SaveEvent) and event.seconds >= 0 for event in seen)


def test_a_handle_is_done_when_its_save_is_committed(tmp_path, disk):
    with Store(tmp_path) as store:
        disk.close()
        handle, ends = store.save(1, state_of(1), wait=False), []
        handle.add_done_callback(lambda save: ends.append((save.step, store.steps())))
        assert isinstance(handle, SaveHandle)
        assert isinstance(handle, concurrent.futures.Future)
        assert not handle.done()
        assert not handle.cancel()
        with pytest.raises(TimeoutError):  # prose: it has no text
            handle.result(0.01)
        disk.open()
        assert handle.result() == tmp_path / "step-00000001"
        assert loaded(tmp_path) == (1, 1)
        store.wait()
        assert ends == [(1, [1])]
        for state in (state_of(2), state_of(2)):  # the second finds the step and compares it
            handle = store.save(2, state)
            assert handle.done()
            assert handle.result() == tmp_path / "step-00000002"


@pytest.mark.parametrize("when", ["full before the copy", "full while writing"])
def test_a_handle_raises_what_its_save_failed_with(tmp_path, disk, monkeypatch, when):
    with Store(tmp_path) as store:
        with monkeypatch.context() as patched:
            if when == "full before the copy":
                patched.setattr("shutil.disk_usage", lambda path: (10**9, 10**9 - 1000, 1000))
            else:
                disk.refuses = 1
            handle = store.save(1, state_of(1), wait=False)
            with pytest.raises(OSError, match="step 1 ") as caught:
                handle.result()
        assert caught.value.errno == errno.ENOSPC
        assert handle.exception() is caught.value
        later = store.save(2, state_of(2), wait=False)  # as without a look at the handle
        assert later.result() == tmp_path / "step-00000002"
        disk.refuses = 1
        assert store.save(3, state_of(3), wait=False).exception().errno == errno.ENOSPC
    # close raises nothing: the caller knows
    assert loaded(tmp_path) == (2, 2)


def test_a_background_save_writes_the_bytes_of_one_that_waits(tmp_path):
    for name, wait in (("a", True), ("b", False)):
        with Store(tmp_path / name) as store:
            store.save(1, state_of(1), wait=wait)
            store.save(
                2, {"m": {**state_of(2)["m"], "f8": torch.ones(7, dtype=torch.float8_e5m2)}}, wait
            )
    for step in (1, 2):
        files = [
            (tmp_path / name / f"step-0000000{step}" / "data-0.bin").read_bytes() for name in "ab"
        ]
        assert files[0] == files[1]


def test_a_save_that_is_smaller_than_the_one_before_has_only_its_own_bytes(tmp_path):
    small = torch.arange(10.0)
    with Store(tmp_path) as store:
        store.save(1, {"w": torch.ones(5000)}, wait=False)
        store.save(2, {"w": small}, wait=False)
        store.wait()
    assert (tmp_path / "step-00000002/data-0.bin").read_bytes() == small.numpy().tobytes()


def test_training_goes_on_while_the_disk_is_slow(tmp_path, disk):
    weight, steps = torch.zeros(BLOCK), []
    with Store(tmp_path) as store:
        disk.close()
        store.save(1, {"w": weight}, wait=False)
        while len(steps) < 3:
            weight += 1
            steps.append(kinds(store.poll()))
        assert steps == [[("staged", 1)], [], []]
        disk.open()
        store.wait()
        back = {"w": torch.ones(BLOCK)}
        assert store.load(back) == 1
        assert not back["w"].any()


def test_a_staged_save_keeps_no_tensor_of_the_state(tmp_path, disk):
    class Gathers:
        def state_dict(self):
            made = torch.ones(BLOCK)
            self.made = weakref.ref(made)
            return {"full": made}

        def load_state_dict(self, state):
            assert state["full"].all()

    with Store(tmp_path) as store:
        source = Gathers()
        disk.close()
        store.save(1, {"source": source}, wait=False)
        kept = source.made() is not None
        disk.open()
        store.wait()
        assert not kept, "it would be in memory twice until it is written"
        store.save(2, {"source": source})
        assert source.made() is None
        assert store.load({"source": source}) == 2


def test_a_save_waits_for_the_one_before(tmp_path, disk):
    with Store(tmp_path) as store:
        disk.close()
        store.save(1, state_of(1), wait=False)
        threading.Timer(0.2, disk.open).start()
        store.save(2, state_of(2))
        assert kinds(store.poll())[:3] == [("staged", 1), ("written", 1), ("committed", 1)]
        assert store.steps() == [1, 2]


@pytest.mark.lane("quick")
def test_load_and_close_wait(tmp_path, disk):
    store = Store(tmp_path)
    disk.close()
    store.save(1, state_of(1), wait=False)
    threading.Timer(0.2, disk.open).start()
    assert store.load(state_of(0)) == 1
    disk.close()
    store.save(2, state_of(2), wait=False)
    threading.Timer(0.2, disk.open).start()
    store.close()
    assert loaded(tmp_path) == (2, 2)


def test_a_failed_save_is_reported_and_replaced_by_the_next(tmp_path, disk, caplog):
    caplog.set_level(logging.WARNING)
    with Store(tmp_path) as store:
        store.save(1, state_of(1))
        disk.refuses = 1
        store.save(2, state_of(2), wait=False)
        store.save(3, state_of(3), wait=False)
        store.wait()
        events = store.poll()
        failed = [event for event in events if event.kind == "failed"]
        assert [(event.step, event.failures) for event in failed] == [(2, 1)]
        assert "step 2 " in failed[0].error
        assert "step 2 " in caplog.text
        assert store.steps() == [1, 3]
    assert not list(tmp_path.glob("*.tmp-*"))


def test_the_last_failure_in_a_row_is_raised(tmp_path, disk):
    with Store(tmp_path, max_failures=2) as store:
        disk.refuses = 99
        for step in (1, 2):
            store.save(step, state_of(step), wait=False)
        with pytest.raises(OSError, match="step 2 "):
            store.save(3, state_of(3), wait=False)
        disk.refuses = 0
        store.save(3, state_of(3))
        assert store.steps() == [3]


@pytest.mark.parametrize(
    "end", [Store.wait, Store.close, lambda store: store.__exit__(*[None] * 3)]
)
def test_the_failure_of_the_last_save_is_raised_at_the_end(tmp_path, disk, end):
    store = Store(tmp_path)
    disk.refuses = 1
    store.save(1, state_of(1), wait=False)
    with pytest.raises(OSError, match="step 1 "):
        end(store)
    store.close()


@pytest.mark.parametrize("end", [Store.wait, Store.close])
def test_a_failure_before_the_copy_is_raised_at_the_end_too(tmp_path, monkeypatch, end):
    store = Store(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda path: (10**9, 10**9 - 1000, 1000))
        store.save(1, state_of(1), wait=False)
    with pytest.raises(OSError, match="step 1 "):
        end(store)
    store.close()


def test_a_step_that_failed_after_its_rename_is_committed_when_it_is_saved_again(
    tmp_path, monkeypatch
):
    def fails(path):
        raise OSError(errno.EIO, "Input/output error")

    with Store(tmp_path) as store:
        with monkeypatch.context() as patched:
            patched.setattr("forge_ckpt.directories.sync_folder", fails)
            store.save(1, state_of(1), wait=False)
            with pytest.raises(OSError, match="Input/output error") as caught:
                store.wait()
        assert directories.NOT_DURABLE in str(caught.value)
        assert [(e.kind, e.failures) for e in store.poll()][-1] == ("failed", 1)
        store.save(1, state_of(1))
        assert kinds(store.poll()) == [("committed", 1)]
        with rejects("step", 1, "exists", StepExists):
            store.save(1, state_of(2))
        assert store.poll() == [], "a save that is rejected is no failed save"


def test_a_copy_that_the_system_denies_is_a_failed_save(tmp_path, monkeypatch, caplog):
    def refuses(area, layout):
        raise OSError("no memory for so much")  # without a number, and so without strerror

    with Store(tmp_path) as store:
        with monkeypatch.context() as patched:
            patched.setattr("forge_ckpt.write.staging.StagingArea.stage", refuses)
            store.save(1, state_of(1), wait=False)
        with pytest.raises(OSError, match=r"step 1 .*: no memory for so much;"):
            store.wait()
    assert "no memory for so much" in caplog.text


def test_memory_that_prepare_cannot_get_is_left_to_the_save(tmp_path, monkeypatch):
    def refuses(area, size, for_cuda):
        raise MemoryError

    with Store(tmp_path) as store:
        with monkeypatch.context() as patched:
            patched.setattr("forge_ckpt.write.staging.StagingArea.reserve", refuses)
            store.prepare(state_of(1))
            store.wait()  # nothing was saved, so no save has failed
        store.save(1, state_of(1), wait=False)
    assert loaded(tmp_path) == (1, 1)


def test_a_disk_that_is_full_before_the_first_save_is_reported(tmp_path, monkeypatch, caplog):
    with Store(tmp_path) as store:
        with monkeypatch.context() as patched:
            patched.setattr("shutil.disk_usage", lambda path: (10**9, 10**9 - 1000, 1000))
            store.prepare(state_of(1))
        (record,) = caplog.records
        assert record.args[0] == tmp_path
        assert record.args[1].errno == errno.ENOSPC
        store.save(1, state_of(1), wait=False)
    assert loaded(tmp_path) == (1, 1)


def test_an_error_of_the_block_hides_no_failed_save(tmp_path, disk, caplog):
    def save_and_raise():
        with Store(tmp_path) as store:
            disk.refuses = 1
            store.save(1, state_of(1), wait=False)
            raise ZeroDivisionError("of_the_block")

    with pytest.raises(ZeroDivisionError, match="of_the_block"):
        save_and_raise()
    assert "step 1 " in caplog.text


@pytest.mark.lane("quick")
def test_an_interrupt_of_a_wait_leaves_the_save_to_close(tmp_path, disk):
    def wait_and_be_interrupted():
        with Store(tmp_path) as store:
            disk.close()
            store.save(1, state_of(1), wait=False)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            threading.Timer(0.6, disk.open).start()
            store.wait()

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):  # prose: an interrupt has no text
            wait_and_be_interrupted()
    finally:
        signal.signal(signal.SIGALRM, before)
    # the staging memory must not be unmapped under the threads that write it
    assert loaded(tmp_path) == (1, 1)


END_AFTER_CLOSE = """
import sys, torch
from forge_ckpt import Store

with Store(sys.argv[1]) as store:
    store.save(1, {"m": {f"w{n}": torch.ones(10) for n in range(2000)}}, wait=False)
"""


@pytest.mark.slow
def test_a_program_can_end_right_after_close(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", END_AFTER_CLOSE, tmp_path], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_worker_that_is_forked_during_a_save_ends_without_it(tmp_path, disk):
    with Store(tmp_path) as store:
        disk.close()
        store.save(1, state_of(1), wait=False)
        worker = multiprocessing.get_context("fork").Process(target=list)
        worker.start()
        worker.join(20)
        code = worker.exitcode
        worker.kill()
        disk.open()
    assert code == 0
    assert loaded(tmp_path) == (1, 1)


def test_damage_found_by_retention_is_raised_at_the_next_call(tmp_path, monkeypatch):
    def damage(event):
        if (
            event.kind == "written"
        ):  # the digests are in the manifest, the bytes not yet under their name
            path = next(tmp_path.glob("*.tmp-*/data-0.bin"))
            with open(path, "r+b") as file:
                file.write(b"\xff" * 8)

    with Store(tmp_path, keep_last=1) as store:
        store.save(1, state_of(1))
    with Store(tmp_path, keep_last=1, on_event=damage) as store:
        store.save(2, state_of(2), wait=False)
        with rejects("step", 2, "new", CorruptCheckpoint) as caught:
            store.save(3, state_of(3), wait=False)
        assert_problem(caught.value, "block", 0, "digest")
        assert store.steps() == [1]
        assert [step for step, _ in store.quarantined] == [2]


def test_staging_beyond_its_bound_is_rejected(tmp_path):
    with Store(tmp_path, staging_gib=2**20 / 2**30) as store:
        with rejects("staging_gib", 2**-10, "size", where="0.0078"):
            store.save(1, state_of(1), wait=False)
        with rejects("staging_gib", 2**-10, "size"):
            store.prepare(state_of(1))
        assert not list(tmp_path.glob("step-*"))
        store.save(1, state_of(1))
        assert store.steps() == [1]
    with Store(tmp_path, staging_gib=1) as store:
        store.prepare(state_of(1))
        assert not list(tmp_path.glob("*.tmp-*"))
        store.save(1, state_of(1), wait=False)
    assert loaded(tmp_path) == (1, 1)
    for bad in (0, -1, float("nan")):
        with rejects("staging_gib", bad, "range"):
            Store(tmp_path, staging_gib=bad)
    with rejects("max_failures", 0, "range"):
        Store(tmp_path, max_failures=0)


def test_an_exception_of_on_event_undoes_nothing(tmp_path, caplog):
    def broken(event):
        raise ZeroDivisionError

    with Store(tmp_path, on_event=broken) as store:
        store.save(1, state_of(1), wait=False)
    assert loaded(tmp_path) == (1, 1)
    assert "on_event of committed at step 1" in caplog.text


def test_a_full_disk_is_found_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: (10**9, 10**9 - 1000, 1000))
    for wait in (True, False):
        with Store(tmp_path, max_failures=2) as store:
            if not wait:
                store.save(1, state_of(1), wait)
            with pytest.raises(OSError, match=r"0.00839 GB .* 1e-06 GB ") as caught:
                store.save(1, state_of(1), wait)
            assert caught.value.errno == errno.ENOSPC
            assert [event.failures for event in store.poll()] == ([1] if wait else [1, 2])
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.slow
def test_a_process_that_closes_nothing_commits_its_last_save(tmp_path):
    script = f"""
import sys, time, torch
import forge_ckpt.write.blocks as blocks
from forge_ckpt import Store
write_at = blocks.write_at
def slow(*args):
    time.sleep(0.1)
    write_at(*args)
blocks.write_at = slow
store = Store({str(tmp_path)!r}, keep_last=1)
for step in (1, 2):
    store.save(step, {{"x": torch.full((4_000_000,), float(step))}}, wait=False)
if len(sys.argv) > 1:
    raise ZeroDivisionError
"""
    for step, arguments in ((2, []), (2, ["raise"])):
        ended = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True)
        assert ended.returncode == len(arguments), ended.stderr.decode()
        with Store(tmp_path) as store:
            assert store.steps() == [step], "retention has read it back, too"
            store.verify(step)
        shutil.rmtree(tmp_path)


def test_a_save_that_hangs_does_not_keep_an_error(tmp_path, disk, monkeypatch, caplog):
    monkeypatch.setattr("forge_ckpt.store.END_SECONDS", 0.1)

    def save_and_raise():
        with Store(tmp_path) as store:
            disk.close()
            store.save(1, state_of(1), wait=False)
            raise ZeroDivisionError("of_the_block")

    with pytest.raises(ZeroDivisionError, match="of_the_block"):
        save_and_raise()
    (record,) = [record for record in caplog.records if isinstance(record.args[-1], TimeoutError)]
    assert " 0.1 " in str(record.args[-1])


@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_that_takes_no_direct_writes_is_written_through_the_cache(
    tmp_path, monkeypatch, wait
):
    write_at, direct = forge_ckpt.write.blocks.write_at, []

    def refuse(fd, view, offset):
        if fd in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        write_at(fd, view, offset)

    def opened(path):
        direct.append(os.open(path, os.O_WRONLY))
        return direct[-1]

    monkeypatch.setattr(forge_ckpt.write.blocks, "write_at", refuse)
    monkeypatch.setattr(forge_ckpt.write.blocks, "open_direct", opened)
    with Store(tmp_path) as store:
        store.save(1, state_of(1), wait=wait)
    assert direct
    assert loaded(tmp_path) == (1, 1)


# ---- many ranks

WORLD = 3


def sharded(value):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.full((7, 30), float(value))
    return {"m": {"w": distribute_tensor(full, mesh, [Shard(0)]), "n": value, "same": full.clone()}}


def numbers(state):
    w = state["m"]["w"].full_tensor()
    return sorted(
        {*w.unique().tolist(), *state["m"]["same"].unique().tolist(), float(state["m"]["n"])}
    )


def save_while_voting(root):
    """The training thread exchanges over the same ranks while the writing threads do."""
    disk = Disk()
    votes = []
    with Store(root) as store:
        for step in (1, 2, 3):
            state = sharded(step)
            if dist.get_rank() == 1:
                store.wait()  # else the save before would wait for this disk for ever
                disk.close()
            store.save(step, state, wait=False)
            state["m"]["w"].to_local().fill_(-1)
            state["m"]["same"].fill_(-1)
            for _ in range(20):
                vote = torch.tensor([dist.get_rank()])
                dist.all_reduce(vote)
                votes.append(int(vote))
            assert step not in store.steps(), "rank 1 has not written, so nothing is committed"
            disk.open()
        store.wait()
        events = kinds(store.poll())
        back = sharded(0)
        return store.load(back), numbers(back), set(votes), events[-3:]


@pytest.mark.lane("quick")
@pytest.mark.distributed
def test_many_ranks_commit_together_while_others_vote(tmp_path):
    for step, found, votes, events in run_on_ranks(WORLD, save_while_voting, str(tmp_path)):
        assert (step, found, votes) == (3, [3.0], {3})
        assert events == [("staged", 3), ("written", 3), ("committed", 3)]


def fail_on_one_rank(root):
    disk = Disk()
    with Store(root, max_failures=2) as store:
        store.save(1, sharded(1))
        disk.refuses = dist.get_rank() == 2
        store.save(2, sharded(2), wait=False)
        store.save(3, sharded(3), wait=False)
        store.wait()
        failed = [(e.step, "rank 2" in e.error) for e in store.poll() if e.kind == "failed"]
        return failed, store.steps()


@pytest.mark.distributed
def test_a_failure_of_one_rank_reaches_all(tmp_path):
    assert run_on_ranks(WORLD, fail_on_one_rank, str(tmp_path)) == [([(2, True)], [1, 3])] * WORLD


def stage_too_much_on_one_rank(root):
    with Store(root, staging_gib=1e-9 if dist.get_rank() == 1 else None) as store:
        try:
            store.save(1, sharded(1), wait=False)
        except ValueError as error:
            return error, store.steps()


@pytest.mark.distributed
def test_a_bound_of_one_rank_raises_on_all(tmp_path):
    for error, steps in run_on_ranks(WORLD, stage_too_much_on_one_rank, str(tmp_path)):
        assert_problem(error, "staging_gib", Shown("1e-09"), "size")
        assert error.where == "rank 1"
        assert steps == []


def disagree(root):
    with Store(root) as store:
        try:
            store.save(1, sharded(1), wait=dist.get_rank() == 0)
        except ValueError as error:
            return error


@pytest.mark.distributed
def test_a_mix_of_ranks_that_wait_and_do_not_is_rejected(tmp_path):
    for error in run_on_ranks(2, disagree, str(tmp_path)):
        assert_problem(error, "wait", Shown("[True, False]"), "mismatch")


def test_F197_a_file_staged_in_used_memory_is_that_of_new_memory(tmp_path):
    """Equal states make equal files, also in the gaps between tensors, which are aligned."""
    full = {"a": torch.full((999,), 7.0), "b": torch.full((5,), 7.0)}
    other = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(300), "c": torch.ones(1)}
    files = []
    for name, states in (("used", (full, other)), ("new", (other,))):
        store = Store(tmp_path / name, keep=Keep(last=1))
        for state in states:
            store.save(9 + len(files) if state is full else 20, state, wait=False)
            store.wait()
        files.append((store.path / "step-00000020" / "data-0.bin").read_bytes())
        store.close()
    assert files[0] == files[1]


def test_F183_saves_of_two_threads_keep_their_own_tensors(tmp_path):
    refused = []

    def save(first):
        for step in range(first, first + 16, 2):
            try:
                store.save(step, {"a": torch.full((5000,), float(step))}, wait=False)
            except ValueError:  # the other thread has saved a later one
                refused.append(step)

    with Store(tmp_path, keep_last=100) as store:
        threads = [threading.Thread(target=save, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with Store(tmp_path, read_only=True) as store:
        assert {*store.steps(), *refused} == set(range(16))
        for step in store.steps():
            state = {"a": torch.zeros(5000)}
            store.load(state, newest=step)
            assert state["a"].unique().tolist() == [step]


def test_F196_a_store_in_a_forked_child_is_rejected_by_name(tmp_path):
    def call():
        for run in (lambda: store.save(2, {"a": 2}), lambda: store.load({"a": 0}), store.wait):
            with rejects("store", str(tmp_path), "forked"):
                run()

    with Store(tmp_path) as store:
        store.save(1, {"a": 1})
        child = multiprocessing.get_context("fork").Process(target=call)
        child.start()
        child.join(20)
        assert child.exitcode == 0
        assert store.steps() == [1]


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
def test_F189_a_file_that_is_seen_late_is_read_again(tmp_path, monkeypatch, code):
    real, hidden = os.open, ["step-00000002", "manifest.json", "data-0.bin"]

    def late(path, flags, *args, **kwargs):
        name = os.path.basename(path)
        if name in hidden and not flags & (os.O_CREAT | os.O_WRONLY) and committed.is_dir():
            hidden.remove(name)
            raise OSError(code, os.strerror(code), os.fspath(path))
        return real(path, flags, *args, **kwargs)

    committed = tmp_path / "step-00000002"
    with Store(tmp_path, keep_last=1) as store:
        store.save(1, state_of(1))
        monkeypatch.setattr(os, "open", late)
        store.save(2, state_of(2))
        assert (store.steps(), store.quarantined, hidden) == ([2], [], [])


@pytest.mark.parametrize("gone", ["", "manifest.json", "data-0.bin"])
def test_F189_a_step_that_disappears_is_a_failed_save_and_older_ones_stay(
    tmp_path, monkeypatch, gone
):
    def commit(written, target):
        os.rename(written, target)
        remove(target / gone)

    monkeypatch.setattr("forge_ckpt.files.VISIBLE_SECONDS", 0.01)
    with Store(tmp_path, keep_last=1) as store:
        store.save(1, state_of(1))
        monkeypatch.setattr("forge_ckpt.directories.commit", commit)
        store.save(2, state_of(2), wait=False)
        with pytest.raises(FileNotFoundError, match="step 2 "):
            store.wait()
        with pytest.raises(FileNotFoundError, match="step 3 "):
            store.save(3, state_of(3))
        assert [event.failures for event in store.poll() if event.kind == "failed"] == [1, 2]
        assert 1 in store.steps()
        assert store.quarantined == []
        monkeypatch.undo()
        store.save(4, state_of(4))
        assert loaded(tmp_path) == (4, 4)

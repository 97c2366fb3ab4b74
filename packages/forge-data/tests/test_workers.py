"""What is read ahead is the same stream, also when a worker dies, hangs or raises."""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forge_data import BuiltinCorpus, InvalidData, Loader, PackedStream, Ragged, messages, workers
from forge_data.ledger import Ledger
from forge_data.mixed_stream import MixedStream
from forge_data.mixture import Phase
from forge_data.prepare import workers as chunk_workers
from forge_data.read_ahead import ReadAhead
from forge_testing.problems import rejects
from forge_testing.processes import exit_code, forked

pytestmark = pytest.mark.lane("test")


class Numbers:
    """Rows of two tokens, that of the instance; something happens at instance 21, `times` times."""

    def __init__(self, folder=None, happens=None, times=1):
        self.folder, self.happens, self.times = folder, happens, times

    def __len__(self):
        return 100

    def arrays(self, ids):
        if self.happens and 21 in ids and len(list(self.folder.iterdir())) < self.times:
            (self.folder / str(len(list(self.folder.iterdir())))).touch()
            self.happens()
        tokens = np.stack([ids, ids], 1)
        return {name: tokens for name in ("tokens", "labels", "positions", "document_ids")}

    def fingerprint(self):
        return {}


def ids_of(loader, steps):
    """The instances that were read, by what is in their rows, which must be those of the cursor."""
    found = []
    for _ in range(steps):
        batch = next(loader)
        if isinstance(loader.stream, Numbers):
            assert batch.tokens[:, 0].tolist() == batch.instance_ids.tolist()
        found += batch.instance_ids.tolist()
    return found


def crash():
    faulthandler.disable()
    ctypes.string_at(0)


def hang():
    threading.Event().wait()


ENDS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": crash,
    "exit code 3": lambda: sys.exit(3),
}


@pytest.fixture
def events():
    return []


@pytest.fixture
def watched(tmp_path, events):
    """A loader of Numbers with two workers, where something happens at instance 21 of worker 1."""

    def make(happens, times=1, **options):
        stream = Numbers(tmp_path, happens, times)
        loader = Loader(
            stream, 4, num_workers=2, on_event=lambda *a, **k: events.append((a, k)), **options
        )
        made.append(loader)
        return loader

    made = []
    yield make
    for loader in made:
        loader.close()


@pytest.mark.parametrize("cause", ENDS)
def test_a_worker_that_dies_is_named_and_replaced_with_nothing_lost_or_repeated(
    watched, events, cause
):
    loader = watched(ENDS[cause])
    assert ids_of(loader, 12) == list(range(48))
    ((name,), found) = events[0]
    assert name == "data_worker_lost"
    assert found.pop("pid") != os.getpid()
    assert found == {
        "worker": 1,
        "cause": cause,
        "reading": "instances 20..23 of source Numbers",
        "restarts": 1,
    }
    assert len(events) == 1


def test_a_worker_that_dies_again_and_again_ends_the_run_in_one_line(watched, events):
    loader = watched(ENDS["SIGKILL"], times=9, worker_restarts=2)
    assert ids_of(loader, 5) == list(range(20))
    with pytest.raises(
        ChildProcessError,
        match=r"^.* 1 \(pid \d+\) .* SIGKILL .* 20\.\.23 .* Numbers.* 2 .*worker_restarts.*num_workers 0$",
    ):
        next(loader)
    assert [e[1]["restarts"] for e in events] == [1, 2]
    assert not multiprocessing.active_children()
    assert loader.state_dict()["cursor"] == 20


def test_a_worker_that_hangs_is_named_and_replaced(watched, events, tmp_path, monkeypatch):
    """The clock goes on by 200 s a look while one hangs; nobody waits for it."""
    now = [0.0]

    def clock():
        now[0] += 200 * (any(tmp_path.iterdir()) and not events)
        return now[0]

    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(workers, "_TICK_SECONDS", 0.01)
    loader = watched(hang, worker_timeout_seconds=300.0)
    got = ids_of(loader, 7)
    assert got == list(range(28))
    causes = [e[1]["cause"] for e in events]
    assert [re.findall(r"\d+", cause) for cause in causes] == [["400"]]
    assert events[0][1]["worker"] == 1


def adopt_late_worker(module, name, make):
    """Make a worker in a process that dies before the worker begins, below a subreaper as our own supervisor is one.
    Exits with the worker's code plus 6, or 9 if it lives on."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER

    def parent():
        multiprocessing.set_start_method("forkserver", force=True)  # of Python 3.14
        begin, own = getattr(module, name), os.getpid()

        def late(*arguments):
            while os.getppid() == own:
                time.sleep(0.001)
            begin(*arguments)

        setattr(module, name, late)
        make()

    exit_code(forked(parent))
    for _ in range(300):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            os._exit(os.waitstatus_to_exitcode(status) + 6)
        time.sleep(0.01)
    with open("/proc/thread-self/children") as children:
        os.kill(int(children.read()), signal.SIGKILL)
    os._exit(9)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl of Linux")
@pytest.mark.parametrize(
    "late",
    [
        (workers, "_serve", lambda: workers._Worker(Numbers(), None, 0)),
        (chunk_workers, "_work", lambda: chunk_workers._Worker([], (None, None, None))),
    ],
)
def test_F164_a_worker_ends_with_a_parent_that_dies_before_it_begins(late):
    assert exit_code(forked(lambda: adopt_late_worker(*late))) == 7


def test_workers_killed_while_idle_are_replaced_also_with_answers_in_flight(watched, events):
    loader = watched(None, prefetch=6, worker_restarts=9)
    got = []
    for _ in range(4):
        got += ids_of(loader, 3)
        pids = [worker.pid for worker in loader._ahead._workers]
        with contextlib.suppress(ProcessLookupError):  # killed before, with answers left
            os.kill(random.choice(pids), signal.SIGKILL)
    got += ids_of(loader, 8)
    assert got == list(range(80))
    assert 1 <= len(events) <= 4
    pids = [worker.pid for worker in loader._ahead._workers]
    loader.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError, match=r"\[Errno 3\]"):
            os.kill(pid, 0)


HOW = {"here": {}, "thread": {"prefetch": 2}, "workers": {"num_workers": 2}}


@pytest.mark.parametrize("how", HOW)
def test_an_error_of_a_sources_code_is_one_line_with_source_and_sample(tmp_path, how):
    def fail():
        raise KeyError("tape")

    streams = {"books": Numbers(), "tapes": Numbers(tmp_path, fail, times=9)}
    loader = Loader(MixedStream(streams, [Phase(0, (1.0, 1.0))]), 4, **HOW[how])
    mixture = loader.stream.mixture
    bad = next(
        i for i in range(99) if [int(x[0]) for x in mixture.locate(np.array([i]))] == [1, 21]
    )
    assert ids_of(loader, bad // 4) == list(range(bad // 4 * 4))
    with rejects("", ..., "source_error", InvalidData) as error:
        next(loader)
    assert error.value.where == f"instance {bad} of source tapes"
    assert re.search(r" KeyError: 'tape' \(.*test_workers.py:\d+\)", str(error.value))
    assert "\n" not in str(error.value)
    assert loader.cursor == bad // 4 * 4
    loader.close()


@pytest.mark.parametrize("how", HOW)
def test_what_a_worker_sends_arrives_as_it_was(how):
    class Odd:
        def arrays(self, ids):
            zeros = torch.zeros(len(ids), 3, dtype=torch.int64)
            return {
                "tokens": zeros,
                "labels": zeros,
                "positions": zeros.numpy(),
                "document_ids": zeros.t().contiguous().t(),
                "weights": torch.rand(len(ids), 3, generator=torch.Generator().manual_seed(1)),
                "half": torch.arange(len(ids) * 2.0).reshape(-1, 2).bfloat16(),
                "empty": torch.zeros(len(ids), 0),
                "many": Ragged(torch.arange(5.0), torch.tensor([0, 2, 5])),
                "strided": np.arange(40).reshape(2, 20)[:, ::3],
            }

        def fingerprint(self):
            return {}

    loader, other = Loader(Odd(), 2, **HOW[how]), Loader(Odd(), 2)
    a, b = next(loader), next(other)
    loader.close()
    for name in ("tokens", "labels", "positions", "document_ids", "weights"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    for name in ("half", "empty", "strided"):
        assert a.extras[name].dtype == b.extras[name].dtype
        assert torch.equal(a.extras[name], b.extras[name])
    assert torch.equal(a.extras["many"].values, b.extras["many"].values)
    a.tokens[0, 0] = 5  # memory of its own


def test_prefetch_is_ordered_and_bounded():
    begun, full = [], threading.Event()

    def read(step):
        begun.append(step)
        if len(begun) == 3:
            full.set()
        return step

    ahead = ReadAhead(read, 3)
    assert full.wait(20)
    for step in range(50):
        assert len(begun) <= step + 3
        assert ahead.fetch() == step
    ahead.close()


def test_closing_a_prefetching_thread_ends_it():
    before = set(threading.enumerate())
    loader = Loader(PackedStream(BuiltinCorpus("validation"), 64), 4, prefetch=2)
    next(loader)
    (thread,) = set(threading.enumerate()) - before
    loader.close()
    thread.join(20)
    assert not thread.is_alive()
    assert next(loader).instance_ids.tolist() == [4, 5, 6, 7], "nothing more was handed out"
    loader.close()


@pytest.mark.lane("quick")
@pytest.mark.parametrize("seed", range(6))
def test_windows_are_part_of_the_stream_however_it_is_read(seed):
    """Random windows, ranks, workers, steps read ahead and stops: the union is what one list says."""
    draw = random.Random(seed)
    stream = PackedStream(BuiltinCorpus("validation"), 32, seed=seed)
    windows, seen, state = [], [], None
    for _ in range(3):
        world, micro = draw.randint(1, 3), draw.choice([1, 2])
        workers_, batch = draw.choice([0, 0, 1, 2]), micro * draw.randint(1, 5)
        ahead = draw.choice([None, workers_ + 1])
        loaders = [
            Loader(stream, batch, r, world, workers_, micro_batch=micro, prefetch=ahead)
            for r in range(world)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for _ in range(2):
            for _ in range(draw.randint(1, 3)):
                seen += [i for one in loaders for i in next(one).instance_ids.tolist() if i >= 0]
            first = seen[-1] + 1 + draw.randint(0, 6)
            window = first, first + draw.randint(0, 5)
            if seen[-1] + 1 in Ledger(windows).ids(np.arange(2000)):
                windows.append(window)
                for loader in loaders:
                    loader.skip(*window)
        state = loaders[0].state_dict()
        assert all(loader.state_dict() == state for loader in loaders)
        for loader in loaders:
            loader.close()
    left = [i for i in range(2000) if not any(a <= i <= b for a, b in windows)]
    assert seen == left[: len(seen)]


def test_a_message_of_another_side_that_is_gone_ends():
    a, b = socket.socketpair()
    b.sendall(b"\3")
    b.close()
    with pytest.raises(EOFError):  # prose: the error has no text
        messages.receive(a)
    a.close()

"""Damage and refusals on one rank of several: all ranks decide the same, and nothing half happens."""

import contextlib
import errno
import logging
import os
import resource
import shutil
from collections import Counter
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import forge_ckpt.directories
import forge_ckpt.files
from forge_ckpt import CheckpointMismatch, CorruptCheckpoint, Store, StoreInUse
from forge_ckpt._shared.problems import Shown
from forge_ckpt.write.save import PlannedSave
from forge_testing import flip_bit, run_on_ranks, truncate
from forge_testing.problems import ANY, assert_problem

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

WORLD = 3
FILES = ["data-0.bin", "data-1.bin", "data-2.bin", "manifest.json"]


def sharded(value):
    """A tensor with a part on each rank; the mesh is made anew in each call, which costs nothing."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.full((7, 30), float(value)), mesh, [Shard(0)])


def state_of(value):
    return {"m": {"w": sharded(value), "n": value}}


def values(state):
    """All numbers of a state, to see that they are ``value`` or that nothing moved; collective."""
    return sorted({*state["m"]["w"].full_tensor().unique().tolist(), float(state["m"]["n"])})


class Lines(logging.Handler):
    """The log messages of this rank."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("forge_ckpt").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("forge_ckpt").removeHandler(self)


def outcome(run):
    """(class, text) of what ``run`` raises, or its result."""
    try:
        return run()
    except Exception as error:
        return type(error).__name__, str(error)


def raised(run):
    """What ``run`` raises."""
    try:
        run()
    except (ValueError, RuntimeError) as error:
        return error
    raise AssertionError("nothing was raised")


def write_steps(root, steps):
    with Store(root) as store:
        for step in steps:
            store.save(step, state_of(step))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks") / "store"
    run_on_ranks(WORLD, write_steps, str(root), [1, 2])
    return root


@pytest.fixture
def root(original, tmp_path):
    return shutil.copytree(original, tmp_path / "store")


def load_once(root, read_only=False):
    state = state_of(-1)
    with Store(root, read_only=read_only) as store, Lines() as log:
        result = outcome(lambda: store.load(state))
        return result, values(state), log.lines, store.quarantined, outcome(store.steps)


HARM = [(name, harm, WORLD) for name in FILES for harm in (flip_bit, truncate, os.remove)]


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("name", "harm", "world"),
    [*HARM, *((name, flip_bit, 2) for name in FILES)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_F53_damage_of_any_file_and_all_ranks_fall_back_together(root, name, harm, world):
    harm(root / "step-00000002" / name)
    results = run_on_ranks(world, load_once, str(root))
    for result, found, _, aside, steps in results:
        assert (result, found, steps) == (1, [1.0], [1])
        assert [step for step, _ in aside] == [2]
        assert aside == results[0][3]
        assert name in aside[0][1]
    (line,) = [line for _, _, lines, _, _ in results for line in lines]
    assert "step 2 is corrupt, moved to" in line
    assert "\n" not in line
    assert sorted(os.listdir(root / "quarantine" / "step-00000002-0")) == sorted(
        set(FILES) - ({name} if harm is os.remove else set())
    )


def test_no_tensor_of_any_rank_changes_when_the_block_of_one_is_bad(root):
    shutil.rmtree(root / "step-00000001")
    flip_bit(root / "step-00000002" / "data-1.bin")
    results = run_on_ranks(WORLD, load_once, str(root))
    for (kind, text), found, _, _, _ in results:
        assert kind == "CorruptCheckpoint"
        assert text == results[0][0][1]
        assert "data-1.bin" in text
        assert found == [-1.0], "vote between verifying and copying"
    again = run_on_ranks(WORLD, load_once, str(root))  # never from nothing without a word
    assert [result[0] for result, *_ in again] == ["CorruptCheckpoint"] * WORLD


def hidden_on_rank_1(root, names, looks, seconds):
    """What a load finds if rank 1 sees each of ``names`` only at a later look, as on NFS; and a verify of step 2."""
    real, real_seconds, seen = os.open, forge_ckpt.files.VISIBLE_SECONDS, Counter()

    def late(path, *args, **kwargs):
        name = os.path.basename(path)
        seen[name] += 1
        if name in names and seen[name] <= looks:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        return real(path, *args, **kwargs)

    forge_ckpt.files.VISIBLE_SECONDS = seconds
    try:
        with Store(root, read_only=seconds < 1) as store:
            verified = []
            for run in (lambda: store.verify(2), lambda: store.load(state_of(-1))):
                seen.clear()
                os.open = late if dist.get_rank() == 1 else real
                verified.append(outcome(run))
                os.open = real
            return verified, [step for step, _ in store.quarantined], store.steps()
    finally:
        os.open, forge_ckpt.files.VISIBLE_SECONDS = real, real_seconds


def test_what_another_host_sees_late_is_not_damaged(root):
    hidden = ["step-00000002", "data-0.bin", "data-1.bin", "data-2.bin"]
    results = run_on_ranks(WORLD, hidden_on_rank_1, str(root), hidden, 2, 60.0)
    assert results == [([None, 2], [], [1, 2])] * WORLD
    results = run_on_ranks(WORLD, hidden_on_rank_1, str(root), hidden[:1], 10**9, 0.1)
    for ((kind, _), loaded), aside, steps in results:
        assert (kind, loaded, aside, steps) == ("CorruptCheckpoint", 1, [2], [1, 2])


def test_read_only_ranks_fall_back_and_rename_nothing(root):
    flip_bit(root / "step-00000002" / "data-2.bin")
    before = sorted(os.listdir(root))
    results = run_on_ranks(WORLD, load_once, str(root), True)
    assert [result[:2] for result in results] == [(1, [1.0])] * WORLD
    assert sorted(os.listdir(root)) == before
    assert sum(len(lines) for _, _, lines, _, _ in results) == 1


def mismatch_on_one(root):
    state = state_of(-1)
    if dist.get_rank() == 1:
        state["m"]["extra"] = torch.zeros(2)
    with Store(root) as store:
        return raised(lambda: store.load(state)), values(state), store.steps()


def test_another_state_on_one_rank_is_a_mismatch_on_all(root):
    for error, found, steps in run_on_ranks(WORLD, mismatch_on_one, str(root)):
        assert type(error) is CheckpointMismatch
        assert all(line.startswith(f"rank 1: {root}/") for line in str(error).splitlines())
        assert_problem(error, "m.extra", ..., "not_saved")
        assert (found, steps) == ([-1.0], [1, 2])
    assert not (root / "quarantine").exists()


class Loud:
    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        if dist.get_rank() == self.rank:
            raise KeyError("mine")


def load_state_dict_raises(root, rank):
    with Store(root) as store:
        store.save(3, {"m": Loud(9)})
        return outcome(lambda: store.load({"m": Loud(rank)}))


def test_a_load_state_dict_that_raises_on_one_rank_stops_all(tmp_path):
    results = run_on_ranks(WORLD, load_state_dict_raises, str(tmp_path), 2)
    assert results[0] == results[1] == ("RuntimeError", "rank 2: KeyError: 'mine'")
    assert results[2] == ("KeyError", "'mine'")  # raised unchanged on the rank that raised it


def full_disk(root, victim, limit):
    state = state_of(3)
    with Store(root) as store:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard[1]))
        try:
            store.save(3, state)
            result = None
        except OSError as error:
            result = error.errno, str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, hard)
        steps, there = store.steps(), values(state)
        loaded = store.load(state)
        return result, steps, there, loaded, values(state), sorted(os.listdir(root))


@pytest.mark.lane("quick")
@pytest.mark.parametrize("victim", range(WORLD))
@pytest.mark.parametrize("limit", [0, 100])
def test_a_full_disk_of_one_rank_and_no_rank_commits(root, victim, limit):
    for result, steps, there, loaded, found, names in run_on_ranks(
        WORLD, full_disk, str(root), victim, limit
    ):
        code, text = result
        assert code == errno.EFBIG
        assert f" {root}: rank {victim}: {os.strerror(errno.EFBIG)}" in text
        assert (steps, there, loaded, found) == ([1, 2], [3.0], 2, [2.0])
        assert names == ["lock", "step-00000001", "step-00000002"]


def raises_on(root, victim, error):
    class Bad:
        def state_dict(self):
            if dist.get_rank() == victim:
                raise error
            return {"n": 1}

        def load_state_dict(self, state):
            pass

    with Store(root) as store:
        result = outcome(lambda: store.save(3, {**state_of(3), "bad": Bad()}).step)
        return result, store.steps()


@pytest.mark.lane("quick")
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [(ValueError("no"), "ValueError", "no"), (MemoryError("x"), "RuntimeError", "MemoryError: x")],
)
def test_an_exception_of_one_rank_is_raised_on_all(root, victim, error, kind, text):
    results = run_on_ranks(WORLD, raises_on, str(root), victim, error)
    for rank, (result, steps) in enumerate(results):
        own = rank == victim and kind == "RuntimeError"
        assert result == (("MemoryError", "x") if own else (kind, f"rank {victim}: {text}"))
        assert steps == [1, 2]
    assert sorted(os.listdir(root)) == ["lock", "step-00000001", "step-00000002"]


def refusals(root):
    rank, state = dist.get_rank(), state_of(3)
    with Store(root) as store:
        results = [
            raised(lambda: store.save(3 + rank, state)),
            raised(lambda: store.save(1, state)),
            raised(lambda: store.save(3 if rank else -1, state)),
            raised(lambda: store.save(3, {} if rank == 1 else state)),
            raised(lambda: store.load({} if rank == 2 else state)),
        ]
        if rank == 1:
            store.close()
        results.append(raised(lambda: store.save(3, state)))
    return results


REFUSALS = [
    ("step", "[3, 4, 5]", "mismatch", ""),
    ("step", "1", "order", ""),
    ("step", "-1", "range", "rank 0"),
    ("state", "'dict'", "type", "rank 1"),
    ("state", "'dict'", "type", "rank 2"),
    ("store", ANY, "closed", "rank 1"),
]


def test_arguments_that_do_not_fit_together_are_rejected_by_all(root):
    results = run_on_ranks(WORLD, refusals, str(root))
    for errors, (key, shown, code, where) in zip(zip(*results), REFUSALS, strict=True):
        assert len({str(error) for error in errors}) == 1
        for error in errors:
            assert isinstance(error, ValueError)
            assert_problem(error, key, shown if shown is ANY else Shown(shown), code)
            assert error.where == where


def tensors_of_ranks(root):
    """What saves of tensors raise that are not the same on all ranks, and stores of other settings."""
    rank, results = dist.get_rank(), []
    plain, shards = torch.zeros(3), sharded(1)
    others = [
        torch.zeros(4) if rank == 2 else plain,
        torch.zeros(3, dtype=torch.bfloat16) if rank == 1 else plain,
        7 if rank == 1 else plain,
        {"c": 7} if rank == 1 else {"c": plain},
        shards if rank == 1 else torch.zeros(7, 30),
    ]
    with Store(root) as store:
        states = [{"m": {"a": a, "b": plain}} for a in others]
        results += [raised(partial(store.save, 3, state, wait=False)) for state in states]
    for key, mine in (
        ("digest", {"digest": "blake3" if rank == 1 else "sha256"}),
        ("keep", {"keep_last": 2 if rank == 1 else 3}),
        ("max_failures", {"max_failures": 2 if rank == 1 else 3}),
        ("read_only", {"read_only": rank == 1}),
    ):
        results.append((key, raised(partial(Store, root, **mine))))
    return results


def test_F184_differences_between_ranks_are_rejected_before_a_byte_is_written(root):
    before = sorted(os.listdir(root))
    for results in zip(*run_on_ranks(WORLD, tensors_of_ranks, str(root))):
        assert len({str(result) for result in results}) == 1
        key, error = results[0] if isinstance(results[0], tuple) else ("m.a", results[0])
        assert_problem(error, key, ANY, "ranks" if key == "m.a" else "mismatch")
        assert "rank 1" in str(error) or "rank 2" in str(error)
    assert sorted(os.listdir(root)) == before


def save_twice(root, harm):
    with Store(root) as store:
        store.save(3, state_of(3))
        inode = os.stat(os.path.join(root, "step-00000003")).st_ino
        results = [outcome(lambda: store.save(3, state_of(3)).step)]
        other = state_of(3)
        if dist.get_rank() == 1:
            other["m"]["w"].to_local()[0, 0] = 4.0
        results.append(outcome(lambda: store.save(3, other).step))
        kept = os.stat(os.path.join(root, "step-00000003")).st_ino == inode
        dist.barrier()
        if dist.get_rank() == 2:
            with open(os.path.join(root, "step-00000003", harm), "r+b") as file:
                file.write(b"\xff" * 8)
        dist.barrier()
        results.append(outcome(lambda: store.save(3, state_of(3)).step))
        state = state_of(0)
        return results, kept, store.load(state), values(state), [s for s, _ in store.quarantined]


@pytest.mark.lane("quick")
@pytest.mark.parametrize("harm", FILES)
def test_F54_the_same_step_twice_on_many_ranks(root, harm):
    for results, kept, loaded, found, aside in run_on_ranks(WORLD, save_twice, str(root), harm):
        assert results[0] == 3
        assert results[1][0] == "StepExists"
        assert results[2] == 3, "what was there is damaged: quarantined, saved again"
        assert (kept, loaded, found, aside) == (True, 3, [3.0], [3])
    assert sorted(os.listdir(root)) == [
        "lock",
        "quarantine",
        "step-00000001",
        "step-00000002",
        "step-00000003",
    ]


def retention_on_a_bad_disk(root, damaged):
    real = PlannedSave.write_and_commit

    def write(save, *args):
        real(save, *args)
        if dist.get_rank() == 0 and damaged:
            with open(save.writer.path / damaged, "r+b") as file:
                file.write(b"\xff" * 8)

    PlannedSave.write_and_commit = write
    try:
        with Store(root, keep_last=1) as store:
            return (
                outcome(lambda: store.save(3, state_of(3)).step),
                store.steps(),
                store.quarantined,
            )
    finally:
        PlannedSave.write_and_commit = real


@pytest.mark.lane("quick")
@pytest.mark.parametrize("damaged", FILES[:3])
def test_F53_many_ranks_read_back_before_an_old_one_goes(root, damaged):
    results = run_on_ranks(WORLD, retention_on_a_bad_disk, str(root), damaged)
    for (kind, text), steps, aside in results:
        assert kind == "CorruptCheckpoint"
        assert damaged in text
        assert (steps, [step for step, _ in aside]) == ([1, 2], [3])
    results = run_on_ranks(WORLD, retention_on_a_bad_disk, str(root), None)
    assert results == [(3, [3], [])] * WORLD


def slow_commit(root, signals):
    """Rank 0 commits late: a rank that returns before has all the time to be seen."""
    signal, real = dist.FileStore(signals, WORLD), forge_ckpt.directories.commit

    def commit(written, target):
        with contextlib.suppress(RuntimeError):
            signal.wait(["returned"], timedelta(seconds=0.5))
        real(written, target)

    forge_ckpt.directories.commit = commit
    try:
        with Store(root) as store:
            store.save(3, state_of(3))
            there = os.path.exists(os.path.join(root, "step-00000003", "manifest.json"))
            signal.set("returned", "")
            return there
    finally:
        forge_ckpt.directories.commit = real


@pytest.mark.slow
def test_no_rank_returns_before_the_commit(root, tmp_path):
    assert run_on_ranks(WORLD, slow_commit, str(root), str(tmp_path / "signals")) == [True] * WORLD


def open_it(path, other=None):
    where = other if other and dist.get_rank() == 1 else path
    return outcome(lambda: Store(where).close())


def open_and_raise(root, elsewhere):
    return raised(lambda: Store(elsewhere if dist.get_rank() == 1 else root))


def test_a_directory_in_use_is_rejected_by_all(root):
    with Store(root):
        results = run_on_ranks(WORLD, open_it, str(root))
        assert [kind for kind, _ in results] == [StoreInUse.__name__] * WORLD
        assert all(f" pid {os.getpid()} " in text for _, text in results)
    assert run_on_ranks(WORLD, open_it, str(root)) == [None] * WORLD


def test_a_path_that_ranks_do_not_share_is_rejected(root, tmp_path):
    (tmp_path / "mine").mkdir()
    elsewhere = str(tmp_path / "mine")
    for error in run_on_ranks(WORLD, open_and_raise, str(root), elsewhere):
        assert_problem(error, "path", Shown(repr(elsewhere)), "not_shared")
        assert error.where == "rank 1"
    Store(root).close()  # nobody keeps the lock


def test_verify_names_the_file(root):
    flip_bit(root / "step-00000002" / "data-2.bin")
    for (kind, text), sound in run_on_ranks(WORLD, verify_both, str(root)):
        assert kind == CorruptCheckpoint.__name__
        assert "data-2.bin" in text
        assert sound is None


def verify_both(root):
    with Store(root, read_only=True) as store:
        return outcome(lambda: store.verify(2)), outcome(lambda: store.verify(1))


class Picky(Loud):
    """Refuses what step 2 saved, on one rank, before or while it is loaded."""

    def __init__(self, rank, n, early):
        super().__init__(rank)
        self.n = n
        if early:
            self.load_checks = self._look

    def state_dict(self):
        return {"n": self.n}

    def _look(self, state):
        if state["n"] == 2 and dist.get_rank() == self.rank:
            raise ValueError("not this one")

    def load_state_dict(self, state):
        self._look(state)
        self.n = state["n"]


def unusable_on_one_rank(root, early):
    with Store(root) as store:
        for step in (1, 2):
            store.save(step, {**state_of(step), "p": Picky(1, step, early)})
        state = {**state_of(-1), "p": Picky(1, -1, early)}
        return store.load(state), values(state), state["p"].n, store.steps(), store.quarantined


@pytest.mark.lane("quick")
@pytest.mark.parametrize("early", [True, False])
def test_F102_what_one_rank_cannot_use_no_rank_uses(tmp_path, early):
    results = run_on_ranks(WORLD, unusable_on_one_rank, str(tmp_path), early)
    for result in results:
        assert result == results[0]
        step, found, n, steps, ((aside, reason),) = result
        assert (step, found, n, steps, aside) == (1, [1.0], 1, [1], 2)
        assert "rank 1: " in reason
        assert "not this one" in reason

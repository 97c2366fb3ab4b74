"""Who is late, on a clock that the test moves; limits and where a supervisor stands."""

from __future__ import annotations

import pytest

from forge_resilience.heartbeat import HeartbeatRecord
from forge_resilience.supervise import WatchConfig
from forge_resilience.supervise.node_slot import find_node_slot
from forge_resilience.supervise.watch import Watch
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def beat(
    entries: int, phase: str = "step", step: int | None = 1, rank: int = 0, **more
) -> HeartbeatRecord:
    known = {"background": "", "background_seconds": 0.0, "background_entries": 1, **more}
    return HeartbeatRecord(
        rank, 1000 + rank, 77, phase, step, 0.0, entries, **{"steps": 2, **known}
    )


def looks(
    watch: Watch, clock: Clock, seconds: float, beats, running=(0,), every: float = 0.5, **more
):
    """Look every half second for so long; the first that is late, and when."""
    for number in range(1, int(seconds / every) + 1):
        clock.now += every
        late = watch.look(beats, running, **more)
        if late is not None:
            return late, number * every
    return None, seconds


CONFIG = WatchConfig(
    "restart", step_seconds=10, first_step_seconds=100, start_seconds=50, other_seconds=30, limits={"save": 5}
)  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "limit"),
    [("step", 10), ("data", 10), ("evaluate", 30), ("save", 5), ("mine", 30), ("start", 50), ("load", 50)],
)  # fmt: skip
def test_each_phase_has_its_limit(phase, limit):
    clock = Clock()
    watch = Watch(CONFIG, clock=clock)
    late, at = looks(watch, clock, 200, [beat(3, phase, 2)])
    assert (late.rank, late.phase, late.step, late.limit) == (0, phase, 2, limit)
    assert limit < at <= limit + 1


def test_the_first_step_of_an_attempt_may_take_long():
    clock = Clock()
    watch = Watch(CONFIG, clock=clock)
    assert looks(watch, clock, 99, [beat(2, "data", steps=0)])[0] is None
    assert looks(watch, clock, 99, [beat(3, "step", steps=1)])[0] is None
    assert looks(watch, clock, 99, [beat(4, "data", steps=1)])[0] is None
    assert looks(watch, clock, 9.5, [beat(5, "step", steps=2)])[0] is None
    assert looks(watch, clock, 2, [beat(5, "step", steps=2)])[0].limit == 10


def test_entries_push_the_limit_away_and_a_late_rank_is_reported_once():
    clock = Clock()
    watch = Watch(CONFIG, clock=clock)
    for entry in range(1, 20):
        assert looks(watch, clock, 9, [beat(entry, "step", entry)])[0] is None
    assert looks(watch, clock, 3, [beat(19, "step", 19)])[0] is not None
    assert looks(watch, clock, 500, [beat(19, "step", 19)])[0] is None
    assert looks(watch, clock, 11, [beat(20, "step", 20)])[0] is not None


def test_time_in_which_the_watcher_saw_nothing_does_not_count():
    """A laptop that slept, a supervisor that was stopped, a debugger: nobody is late."""
    clock = Clock()
    watch = Watch(CONFIG, clock=clock)
    for _ in range(5):  # of each gap, two seconds at most: 8 s
        clock.now += 3600.0
        assert watch.look([beat(2, "step", 2)], [0]) is None
    assert looks(watch, clock, 3600, [beat(2, "step", 2)], paused=True)[0] is None
    assert looks(watch, clock, 3, [beat(2, "step", 2)])[0] is not None


def test_the_rank_that_is_furthest_beyond_its_limit_is_named():
    clock = Clock()
    watch = Watch(CONFIG, clock=clock)
    stuck = [beat(9, "step", 3, 0), beat(9, "evaluate", 3, 1), beat(9, "save", 3, 2)]
    late, _ = looks(watch, clock, 60, stuck, range(3))
    assert (late.rank, late.phase) == (2, "save")


def test_a_program_without_heartbeats_is_not_late_unless_they_are_expected():
    clock = Clock()
    assert looks(Watch(CONFIG, clock=clock), clock, 500, [], [0, 1])[0] is None
    late, _ = looks(Watch(CONFIG, True, clock), clock, 500, [], [0, 1])
    assert (late.phase, late.limit) == ("start", 50)
    # one rank has a file, so all will
    late, _ = looks(Watch(CONFIG, clock=clock), clock, 500, [beat(1, "data", steps=0)], [0, 1])
    assert (late.rank, late.phase) == (1, "start")
    # a rank that has ended is late no more
    assert looks(Watch(CONFIG, clock=clock), clock, 500, [beat(1)], [])[0] is None


def test_work_in_the_background_has_a_limit_of_its_own():
    clock = Clock()
    watch = Watch(CONFIG, clock=clock)
    for entry in range(2, 20):  # steps go on, the writer hangs
        late, _ = looks(
            watch, clock, 1, [beat(entry, "step", entry, background="save", background_entries=2)]
        )
        if late:
            break
    assert (late.phase.split()[0], late.limit) == ("save", 5)
    for entry in range(20, 40):  # a save a second is no long save
        more = {"background": "save", "background_entries": 2 * entry}
        assert looks(watch, clock, 1, [beat(entry, "step", entry, **more)])[0] is None


def test_no_limit_and_invalid_limits():
    unlimited = WatchConfig("restart", step_seconds=0, limits={"save": 0})
    assert unlimited.limit("step") == unlimited.limit("save") == float("inf")
    assert unlimited.limit("step", first_step=True) == 3600
    assert WatchConfig().shortest == 540
    wrong = {"action": "kill", "step_seconds": -1, "limits": {"x": 1e9}, "max_restarts": -1}
    with rejects("step_seconds", -1, "range") as error:
        WatchConfig(**wrong)
    for problem in (
        ("limits.x", 1e9, "range"),
        ("action", "kill", "unknown"),
        ("max_restarts", -1, "range"),
    ):
        assert_problem(error.value, *problem)
    assert len(error.value.problems) == 4


STEP = {"SLURM_STEP_ID": "3", "SLURM_JOB_ID": "17", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[4-5]"}  # fmt: skip


def test_one_supervisor_a_node_starts_the_ranks_of_that_node():
    place = find_node_slot(4, STEP)
    with place.environs(STEP) as (ranks, store):
        assert store is None
        assert [rank["RANK"] for rank in ranks] == ["4", "5", "6", "7"]
        assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "2", "3"]
        same = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FORGE_RUN_NAME")
        assert {tuple(rank[name] for name in same) for rank in ranks} == {
            ("8", "4", "n4", "20122", "17-3-0")
        }
    assert not place.has_all_ranks  # the other node's ranks cannot be started again from here


@pytest.mark.parametrize(
    ("nproc", "environ", "has_all_ranks"),
    [(None, {}, True), (4, {}, True), (None, {"RANK": "1", "WORLD_SIZE": "4"}, False), (None, STEP, False),
     (None, {"RANK": "0", "WORLD_SIZE": "1"}, True), (2, STEP | {"SLURM_STEP_NUM_TASKS": "1"}, True)],
)  # fmt: skip
def test_ranks_are_started_again_in_place_only_if_all_of_them_are_here(
    nproc, environ, has_all_ranks
):
    assert find_node_slot(nproc, environ).has_all_ranks is has_all_ranks


def test_invalid_paths_are_rejected():
    with rejects("nproc", 2, "in_rank"):
        find_node_slot(2, {"RANK": "1", "WORLD_SIZE": "4"})
    with rejects("nproc", 2, "step_tasks"):
        find_node_slot(2, STEP | {"SLURM_STEP_NUM_TASKS": "4"})

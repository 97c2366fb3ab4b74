"""What campaigns found, and the test that stays."""

from __future__ import annotations

from typing import NamedTuple


class Found(NamedTuple):
    """`fault`: suite, seed and number. `test` fails without the repair."""

    fault: str
    happened: str
    now: str
    test: str


FOUND = (
    Found(
        "wait 0, seed 0 (term in start)",
        "TERM killed one rank that had no handler yet; the other had one and waited to meet it until the time limit",
        "the launcher ends it after the grace; the job's code is 75",
        "test_F59_a_rank_that_waits_for_one_that_a_stop_killed_is_ended_in_time",
    ),
    Found(
        "wait 38, seed 0 (storm in data)",
        "a SIGINT of the storm met the process in atexit, after the stop was saved: tracebacks without a mistake",
        "a signal while a run leaves ends it at once, with the run's code",
        "test_an_interrupt_while_a_run_leaves_prints_no_traceback",
    ),
    Found(
        "async 61, seed 0 (kill_launcher in start)",
        "the launcher was killed before all ranks had a handler: one died with it, the other waited 300 s to meet it",
        "a rank that waits to meet others leaves when it is told to stop and its launcher is gone",
        "test_F59_a_rank_that_waits_to_meet_others_leaves_when_its_launcher_is_killed",
    ),
    Found(
        "wait 82, seed 0 (int in exit)",
        "a SIGINT came behind the sample, a moment before its handler was replaced: a traceback and code 1",
        "one handler serves the sample and what comes behind it",
        "test_an_interrupt_between_the_sample_and_the_end_prints_no_traceback",
    ),
    Found(
        "disk 150, seed 0 (close EIO)",
        "the disk failed while the next life removed an unfinished checkpoint: code 78, which is not started again",
        "what cannot be removed is left with a warning; no save takes its name",
        "test_a_left_over_that_a_failing_disk_keeps_stops_no_run",
    ),
    Found(
        "odd 4, seed 39 (stdout full in start)",
        "ranks whose stdout and stderr were on a full disk ended with an error: a line that is printed at the start raised",
        "what cannot be printed is lost, and changes no code",
        "test_F186_output_that_cannot_be_written_is_lost_with_one_line",
    ),
)

"""The chaos kit on a stranger's program: schedules, strikes in named phases, damage, the command line."""

import collections
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forge_resilience.chaos import (
    FILE_KINDS,
    PROCESS_KINDS,
    damage,
    failure_rate_bound,
    make_schedule,
)
from forge_resilience.chaos.__main__ import files_of
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

# A stranger's loop: counts to 120, saves its count, resumes, leaves with 75 on a stop signal.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from forge_resilience.heartbeat import Heartbeat

folder = Path(sys.argv[1])
stopped = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda *_: stopped.append(1))
heartbeat = Heartbeat.from_environ()
heartbeat.enter("load")
time.sleep(0.01)
saved = sorted(folder.glob("step-*/count"))
try:
    count = int(saved[-1].read_text()) if saved else 0
except ValueError:
    count = int(saved[-2].read_text()) if len(saved) > 1 else 0
while count < 120:
    heartbeat.enter("data", count)
    time.sleep(0.002)
    heartbeat.enter("step")
    time.sleep(0.004)
    count += 1
    if count % 5 == 0 or stopped:
        heartbeat.enter("save")
        time.sleep(0.005)
        step = folder / f"step-{count:04d}"
        step.mkdir(exist_ok=True)
        (step / "new").write_text(str(count))
        os.rename(step / "new", step / "count")
        if stopped:
            os._exit(75)
heartbeat.enter("exit")
print("counted to", count, flush=True)
"""


def test_a_seed_gives_one_schedule_and_every_prefix_is_spread_evenly():
    kinds = {"kill_rank": ["step", "save"], "term": ["load", "step", "save"]}
    one, two = make_schedule(5, 53, kinds, 4), make_schedule(5, 53, kinds, 4)
    assert one == two
    assert one != make_schedule(6, 53, kinds, 4)
    assert one[:20] == make_schedule(5, 20, kinds, 4)
    counts = collections.Counter((fault.kind, fault.phase) for fault in one)
    assert len(counts) == 5
    assert max(counts.values()) - min(counts.values()) <= 1
    assert {fault.rank for fault in one} == {0, 1, 2, 3}
    assert [fault.number for fault in one] == list(range(53))
    with rejects("kinds", ["term"], "missing"):
        make_schedule(0, 3, {"term": []}, 1)


@pytest.mark.parametrize("faults", [60, 300, 3000])
def test_no_failure_is_the_rule_of_three(faults):
    bound = failure_rate_bound(0, faults)
    assert bound == pytest.approx(1 - 0.05 ** (1 / faults), rel=1e-9)
    assert 0.97 * 3 / faults < bound < 3 / faults


def test_the_bound_with_failures_is_clopper_and_pearsons():
    assert failure_rate_bound(1, 10) == pytest.approx(0.39416, abs=1e-5)  # one-sided tables
    assert failure_rate_bound(5, 5) == 1.0
    with rejects("failures", 3, "range"):
        failure_rate_bound(3, 2)


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_damage_is_seeded_and_changes_what_its_name_states(tmp_path, kind):
    def make(name):
        for step in (1, 2):
            folder = tmp_path / name / f"step-{step}"
            folder.mkdir(parents=True)
            (folder / "data.bin").write_bytes(random.Random(step).randbytes(9000))
        damage(kind, folder / "data.bin", 7)
        listed = sorted(p.relative_to(tmp_path / name) for p in (tmp_path / name).rglob("*"))
        whole = [p for p in listed if (tmp_path / name / p).is_file()]
        return listed, [(tmp_path / name / p).read_bytes() for p in whole], folder

    names, contents, folder = make("a")
    names_again, contents_again, _ = make("b")
    assert (names, contents) == (names_again, contents_again)
    clean = [random.Random(step).randbytes(9000) for step in (1, 2)]
    assert contents != clean or kind in ("fifo", "clock", "dangling_latest", "remove", "remove_folder")  # fmt: skip
    if kind == "flip_bit":
        bits = [bin(a ^ b).count("1") for a, b in zip(contents[1], clean[1]) if a != b]
        assert (contents[0], bits) == (clean[0], [1])
    if kind == "clock":
        assert abs(folder.stat().st_mtime - Path(tmp_path).stat().st_mtime) > 80_000
    if kind == "stale_folders":
        assert len(names) == 4 + 200
    if kind == "swap":
        assert contents == clean[:1] * 2


def test_unknown_damage_and_empty_files_are_rejected(tmp_path):
    (tmp_path / "empty").touch()
    with rejects("kind", "melt", "unknown"):
        damage("melt", tmp_path / "empty", 0)
    with rejects("", ..., "empty", where=tmp_path / "empty"):
        damage("flip_bit", tmp_path / "empty", 0)


def chaos(tmp_path, *arguments, program=PROGRAM):
    """The rows of a trial of the program, its exit code and what it printed on stderr."""
    script, run = tmp_path / "program.py", tmp_path / "run"
    script.write_text(program)
    run.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "forge_resilience.chaos", "--output", str(tmp_path / "log"), *arguments]  # fmt: skip
    told = subprocess.run(
        [*command, "--", sys.executable, str(script), str(run)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    return [json.loads(line) for line in told.stdout.splitlines()], told


@pytest.mark.slow
def test_a_program_without_forge_under_faults_in_named_phases(tmp_path):
    kinds = "kill_rank,term,segfault,usr1_rank,flip_bit"
    rows, told = chaos(
        tmp_path, "--seed", "3", "--faults", "8", "--kinds", kinds,
        "--phases", "load,data,step,save", "--files", f"{tmp_path}/run/step-*/count",
    )  # fmt: skip
    struck = [row for row in rows if row["struck"]]
    assert told.returncode == 0, (rows, told.stderr)
    assert len(struck) >= 4, "the program ended too early to be struck"
    for row in struck:
        assert row["phase"] in ("load", "data", "step", "save", "between")
        expected = {"kill_rank": {-9}, "segfault": {-11}, "flip_bit": {0}}.get(row["kind"], {75, 0})
        assert row["code"] in expected, row
        assert row["recovery_seconds"] > 0
    assert f"{len(struck)} of 8 faults" in told.stderr
    assert (tmp_path / "log").read_text().count("counted to 120") == 1
    assert len(PROCESS_KINDS) == 16


def test_a_program_that_cannot_go_on_is_a_failure(tmp_path):
    arguments = ("--faults", "1", "--kinds", "term", "--phases", "step")
    forgetful = PROGRAM.replace("count = int(saved[-1].read_text())", "count = sys.exit(3)")
    rows, told = chaos(tmp_path, *arguments, program=forgetful)
    assert told.returncode == 1, rows
    assert re.search(r"\b3\b", rows[0]["problem"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kinds", "melt"), "--kinds melt "),
        (("--kinds", "flip_bit"), "--files;"),
    ],
)
def test_wrong_arguments_are_rejected(tmp_path, arguments, message):
    _, told = chaos(tmp_path, *arguments)
    assert told.returncode == 2
    assert message in told.stderr


def test_F149_a_file_of_the_name_of_a_pattern_is_that_file(tmp_path):
    for name in ("a[1].bin", "a1.bin"):
        (tmp_path / name).touch()
    assert files_of(str(tmp_path / "a[1].bin")) == [tmp_path / "a[1].bin"]
    assert files_of(str(tmp_path / "a?.bin")) == [tmp_path / "a1.bin"]

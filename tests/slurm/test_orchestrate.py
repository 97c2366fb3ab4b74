"""The orchestrator on a real Slurm: sizes, ends, and SIGKILL at each of its commands. Its jobs are shell scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.slurm.cluster import Slurm, wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# One life: notes where it runs, does what the file life-N says, stays until the file `finish` is there, leaves with
# 75 when it is told to.
_JOB = """#!/bin/bash
#SBATCH --exclusive --no-requeue --output={folder}/out
cd {folder}
trap 'echo "end $SLURM_JOB_ID" >>runs; echo "$SLURM_JOB_ID $code" >>ends-{name}' EXIT
trap 'exit $((code = 75))' USR1 TERM
echo "begin $SLURM_JOB_ID $SLURM_JOB_NUM_NODES" >>runs
life=$(grep -c begin runs)
code=0
[ ! -e life-$life ] || . ./life-$life
until [ -e finish ]; do sleep 0.1; done
exit $code
"""
_ORCHESTRATE = """
import sys
from pathlib import Path
from forge_resilience.slurm.orchestrate import OrchestratorConfig, orchestrate
config = OrchestratorConfig(wait_seconds=2, grow_after_seconds=1, max_resizes_per_hour=int(sys.argv[3]), poll_seconds=0.2)
folder = Path(sys.argv[1])
sys.exit(orchestrate(folder / "job.sh", [4, 3, 2], sys.argv[2], config, max_restarts=4, journal=folder / "events.jsonl"))
"""
# A client command that kills the orchestrator before or after it did its work, once for each file in `points`.
_CLIENT = """#!/bin/bash
kind={program}
case "$*" in *--test-only*) kind=test ;; *--signal*) kind=tell ;; esac
strike() {{
  rm {folder}/points/$kind-$1 2>/dev/null || return
  echo $kind-$1 >>{folder}/struck
  kill -KILL $PPID
}}
strike before && exit 1
{real} "$@"
code=$?
strike after
exit $code
"""


class Run:
    """An orchestrated run in a folder of its own."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.name = f"run-{folder.name}"
        (folder / "job.sh").write_text(_JOB.format(folder=folder, name=self.name))
        (folder / "points").mkdir()
        (folder / "bin").mkdir()
        for program in ("sbatch", "squeue", "scancel", "sinfo"):
            client = folder / "bin" / program
            client.write_text(
                _CLIENT.format(program=program, folder=folder, real=f"/usr/bin/{program}")
            )
            client.chmod(0o755)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, resizes: int = 1) -> subprocess.Popen[str]:
        environ = {**os.environ, **self.slurm.environ}
        environ["PATH"] = f"{self.folder}/bin:{environ['PATH']}"
        command = [sys.executable, "-c", _ORCHESTRATE, str(self.folder), self.name, str(resizes)]
        process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def life(self, number: int, does: str) -> None:
        (self.folder / f"life-{number}").write_text(textwrap.dedent(does))

    def finish(self) -> None:
        (self.folder / "finish").touch()

    def lives(self) -> list[tuple[str, str]]:
        """(job, its nodes) of each life so far. Never two at once."""
        path = self.folder / "runs"
        rows = [row.split() for row in path.read_text().splitlines()] if path.exists() else []
        begun = [(row[1], row[2]) for row in rows if row[0] == "begin"]
        assert [row[:2] for row in rows] == [
            [e, job] for job, _ in begun for e in ("begin", "end")
        ][: len(rows)]
        return begun

    def wait_for_life(self, number: int) -> None:
        wait_until(lambda: len(self.lives()) >= number, every=0.1)

    def jobs(self) -> list[str]:
        """All jobs of the run, in the order of their submission."""
        out = self.slurm.run(
            "squeue", "--noheader", "--states=all", f"--name={self.name}", "--format=%i %T"
        )
        return sorted(line for line in out.splitlines())


@pytest.fixture
def run(slurm: Slurm, tmp_path: Path):
    own = Run(slurm, tmp_path)
    yield own
    for process in own.processes:
        if process.poll() is None:
            process.kill()
            process.communicate()
    slurm.tidy()
    wait_until(lambda: not slurm.run("squeue", "--noheader", f"--name={run.name}"))


def test_sizes_follow_nodes_that_crash_and_come_back(run, slurm):
    """One stop for growth in an hour, as the bound says: the second time it stays."""
    process = run.start()
    run.wait_for_life(1)
    wait_until(lambda: len(slurm.idle()) == 1)
    slurm.crash("n2")
    run.wait_for_life(2)
    slurm.revive("n2")
    run.wait_for_life(3)
    slurm.drain("n1")
    run.folder.joinpath("life-4").write_text("touch waits; until [ -e go ]; do sleep 0.1; done")
    slurm.usr1(run.lives()[-1][0])  # a stop by somebody else
    run.wait_for_life(4)
    slurm.resume("n1")
    time.sleep(2)  # twice grow_after_seconds: it must not move
    run.folder.joinpath("go").touch()
    run.finish()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert [nodes for _, nodes in run.lives()] == ["4", "3", "4", "3"]
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    told = [(e["event"], e.get("cause")) for e in events if e["event"] != "submit"]
    assert told == [("lost", "node_fail"), ("grow", None), ("left", "failed"), ("left", "failed")]


POINTS = [
    f"{kind}-{when}"
    for kind in ("squeue", "test", "sbatch", "tell", "sinfo", "scancel")
    for when in ("before", "after")
]


def test_killed_at_each_command_no_second_job_appears(run, slurm):
    """Before and after the command took effect, in each life of the job: submission, growth, withdrawal, the ends."""
    arm = "for point in " + " ".join(POINTS) + "; do touch points/$point; done\n"
    for point in POINTS:
        (run.folder / "points" / point).touch()
    run.life(1, arm + "until [ -e first ]; do sleep 0.1; done; exit $((code = 75))")
    run.life(2, arm)  # on three nodes, until it grows
    run.life(3, arm + "until [ -e third ]; do sleep 0.1; done; exit $((code = 75))")
    run.life(4, arm)
    story = tell(run, slurm)
    next(story)
    process, killed = run.start(resizes=9), 0
    deadline = time.monotonic() + 120
    while process.poll() in (None, -signal.SIGKILL):
        assert time.monotonic() < deadline, (run.lives(), run.jobs())
        if process.poll() is not None:
            killed += 1
            process = run.start(resizes=9)
        next(story, None)
        time.sleep(0.05)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert [nodes for _, nodes in run.lives()] == ["4", "3", "4", "3"]
    assert len(run.jobs()) == 5, run.jobs()  # four lives, and one that was withdrawn
    struck = (run.folder / "struck").read_text().split()
    assert set(struck) == set(POINTS)
    assert len(struck) == killed


def tell(run: Run, slurm: Slurm):
    """What happens to the nodes meanwhile; each step waits for what the orchestrator did."""

    def waiting() -> str:
        return slurm.run(
            "squeue", "--noheader", f"--name={run.name}", "--states=PENDING", "--format=%D"
        ).strip()

    yield
    while len(run.lives()) < 1:
        yield
    slurm.drain("n4")
    (run.folder / "first").touch()
    while len(run.lives()) < 2:
        yield
    slurm.resume("n4")
    while len(run.lives()) < 3:
        yield
    high = slurm.preempt(
        "--nodes=4", "--dependency=afterany:" + run.lives()[-1][0]
    )  # takes all nodes, and then some
    (run.folder / "third").touch()
    while waiting() != "4":
        yield
    slurm.drain("n3")
    slurm.cancel(high)
    while len(run.lives()) < 4:
        yield
    run.finish()


def test_a_node_that_was_found_broken_is_left_out(run, slurm):
    """Beside those that the script leaves out; without a known node 71 is the end."""
    script = run.folder / "job.sh"
    script.write_text(script.read_text().replace("#SBATCH", "#SBATCH --exclude=n4", 1))
    found = json.dumps({"event": "health", "nodes": ["n2"], "is_known": True})
    run.life(1, f"echo '{found}' >>events.jsonl; exit $((code = 71))")
    run.life(2, "exit $((code = 71))")
    process = run.start()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 71, err
    first, second = (job for job, _ in run.lives())
    assert slurm.job(first)["ExcNodeList"] == "n4"
    assert slurm.job(second)["ExcNodeList"] == "n[2,4]"
    assert slurm.job(second)["NodeList"] == "n[1,3]"


@pytest.mark.parametrize(
    ("does", "code"),
    [("exit $((code = 65))", 65), ("kill -KILL $$", 137), ("scancel $SLURM_JOB_ID; wait", 1)],
)
def test_a_job_that_is_not_to_be_restarted_ends_the_orchestrator_with_its_code(run, does, code):
    run.life(1, does)
    process = run.start()
    _, err = process.communicate(timeout=90)
    assert process.returncode == code, err
    assert len(run.jobs()) == 1


def test_idle_cores_of_its_own_nodes_are_no_more_nodes(run, slurm):
    """A job that takes a core of each node leaves room for another one there, and needs a fourth node to grow."""
    script = run.folder / "job.sh"
    script.write_text(script.read_text().replace("--exclusive", "--ntasks-per-node=1"))
    slurm.drain("n4")
    process = run.start()
    run.wait_for_life(1)
    time.sleep(3)  # three times grow_after_seconds: it must not move
    run.finish()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert [nodes for _, nodes in run.lives()] == ["3"]


def test_a_second_job_of_the_run_waits_and_is_withdrawn(run, slurm):
    """As after a submission whose answer was lost."""
    process = run.start()
    run.wait_for_life(1)
    options = ("--dependency=singleton", f"--job-name={run.name}", run.folder / "job.sh")
    second = slurm.sbatch(*options)
    assert slurm.wait_for(second, "CANCELLED")
    run.finish()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert len(run.lives()) == 1


def test_an_end_that_slurm_has_forgotten_is_read_from_the_jobs_own_list(run, slurm):
    run.life(1, "until [ -e go ]; do sleep 0.1; done; exit $((code = 65))")
    process = run.start()
    run.wait_for_life(1)
    process.kill()
    process.wait()
    (run.folder / "go").touch()
    wait_until(lambda: (run.folder / f"ends-{run.name}").exists())
    squeue = run.folder / "bin" / "squeue"
    squeue.write_text(squeue.read_text().replace("/usr/bin/squeue", "true"))
    process = run.start()
    process.wait(timeout=60)
    assert process.returncode == 65
    assert len(run.jobs()) == 1


def test_F193_sizes_that_do_not_fit_and_a_damaged_state_file_lose_no_job(run, slurm):
    slurm.drain("n2", "n3", "n4")
    process = run.start()
    wait_until(run.jobs, every=0.1)
    process.kill()
    assert "4, 3, 2" in process.communicate()[1]
    (run.folder / f"orchestrator-{run.name}.json").write_text("{")
    (run.folder / f"ends-{run.name}").write_text("99999999999999999999 0\n")
    process = run.start()
    slurm.resume("n2")
    run.wait_for_life(1)
    run.finish()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert f"orchestrator-{run.name}.json" in err
    assert [nodes for _, nodes in run.lives()] == ["2"]


def test_a_silent_controller_decides_nothing_and_a_rejection_is_reported(run, slurm):
    run.life(1, "exit $((code = 75))")
    process = run.start()
    run.wait_for_life(2)
    slurm.restart_controller()
    run.finish()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert len(run.lives()) == 2
    (run.folder / f"orchestrator-{run.name}.json").unlink()
    script = run.folder / "job.sh"
    script.write_text(script.read_text().replace("#SBATCH", "#SBATCH --partition=none"))
    process = run.start()
    _, err = process.communicate(timeout=90)
    assert "QueueRefusal: sbatch: " in err
    assert "invalid partition" in err

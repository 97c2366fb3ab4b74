"""Batch scripts on a real Slurm: each way in which a life ends, and what the next one finds."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.slurm.cluster import Slurm, wait_until

from forge_resilience.slurm import JobFacts, SlurmConfig, batch_script
from forge_testing import Outcome, forge_train, write_job
from forge_testing.problems import rejects
from forge_train import read_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# A stranger's trainer: rank 0 saves when it is told to stop, as `what` (a word for each life) says otherwise.
_TRAINER = """
import json, os, signal, sys, time
from pathlib import Path
run, *lives = sys.argv[1:]
run, rank = Path(run), int(os.environ["SLURM_PROCID"])
element = os.environ.get("SLURM_ARRAY_TASK_ID", "")
told = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: told.append(signal.Signals(number).name))
def note(event, **more):
    line = json.dumps({"event": event, "rank": rank, "life": life, "element": element, "node": os.environ["SLURMD_NODENAME"], **more})
    with open(run / "events", "a") as file:
        file.write(line + "\\n")
def save():
    if rank == 0:
        (run / "checkpoints" / f"step-{life}").mkdir(parents=True, exist_ok=True)
        (run / "checkpoints" / f"step-{life}" / "manifest.json").write_text("{}")
mine = run / f"lives{element}-{rank}"
life = len(mine.read_text()) if mine.exists() else 0
mine.write_text("x" * (life + 1))
what = (lives + ["0"] * 9)[life]
note("start", argv=sys.argv[1:], threads=os.environ.get("OMP_NUM_THREADS"), tasks=os.environ["SLURM_STEP_NUM_TASKS"])
if what == "wait":
    while not told:
        time.sleep(0.05)
        if not (run / "alive").exists() and len(list(run.glob("gone*"))):  # what a lost peer is for a collective
            sys.exit(1)
    time.sleep(0.3)
    save()
    note("saved", told=told)
    sys.exit(75)
if what == "75":
    save()
sys.exit(int(what))
"""


class Job:
    """A run of that trainer."""

    def __init__(self, slurm: Slurm, run: Path, lives: str, **options: Any) -> None:
        self.slurm, self.run = slurm, run
        (run / "slurm").mkdir(parents=True)
        trainer = run / "trainer.py"
        trainer.write_text(_TRAINER)
        self.facts = JobFacts(str(run), str(run / "slurm/job.sh"), str(run), save_limit_seconds=30)
        command = [sys.executable, "-S", str(trainer), str(run), *lives.split()]
        self.text = batch_script(SlurmConfig(**options), command, self.facts)

    def submit(self, *options: str) -> str:
        Path(self.facts.script).write_text(self.text)
        self.id = self.slurm.sbatch(*options, self.facts.script)
        return self.id

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.run / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait_for_starts(self, count: int) -> None:
        wait_until(lambda: len(self.events("start")) >= count)

    def end(self) -> tuple[str, str, str]:
        """(state, exit code, restarts)."""
        self.slurm.wait_for_end(self.id)
        job = self.slurm.job(self.id)
        return job["JobState"], job["ExitCode"], job["Restarts"]

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted((self.run / "slurm").glob("job-*.out")))


def submit_forge(
    slurm: Slurm, *arguments: str | Path, cwd: Path | None = None, **environ: str
) -> Outcome:
    return forge_train("slurm", *arguments, cwd=cwd, **{**slurm.environ, **environ})


def test_F60_F65_a_job_that_slurm_warns_of_its_limit_goes_on_and_completes(slurm, tmp_path):
    """Submitted from a job of its own, whose variables are around, with relative and odd paths."""
    folder = tmp_path / 'a "50%" job'
    folder.mkdir()
    write_job(
        folder,
        '[resilience]\nsave_limit_seconds = 30\n[slurm]\nnodes = "1-2"\ncpus_per_task = 1\n',
        run_dir="runs/it's one",
    )
    leaking = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "3", "SLURM_MEM_PER_CPU": "1", "SLURM_MEM_PER_NODE": "2",
               "SLURM_CPU_BIND": "mask_cpu:0x80000", "RANK": "5", "WORLD_SIZE": "9", "SLURM_ARRAY_JOB_ID": "1"}  # fmt: skip
    done = submit_forge(slurm, "job.toml", "--submit", "--train.steps", "3000", "--metrics.every_steps", "1", "--eval.every_steps", "0",
                        "--checkpoint.every_steps", "0", cwd=folder, **leaking)  # fmt: skip
    assert done.code == 0, done.err
    job = done.out.strip()
    run = folder / "runs/it's one"
    (folder / "job.toml").write_text("edited while it waits")
    wait_until(
        lambda: (run / "metrics.jsonl").exists() and len(read_run(run).metrics.get("step", [])) > 5
    )
    slurm.usr1(job)
    slurm.wait_for(job, "PENDING")
    (stop,) = [event for event in read_run(run).events if event["event"] == "stop"]
    saved = [event["step"] for event in read_run(run).events if event["event"] == "save"]
    assert saved == [stop["step"]], "once, when it stopped"
    # its own configuration, which waits beside the script, is that of the next life
    own = run / "slurm/job.toml"
    own.write_text(own.read_text().replace("steps = 3000", f"steps = {saved[0] + 20}"))
    assert slurm.wait_for_end(job) == "COMPLETED"
    assert (slurm.job(job)["Restarts"], slurm.job(job)["ExitCode"]) == ("1", "0:0")
    assert read_run(run).metrics["step"] == list(range(1, saved[0] + 21))
    log = (run / f"slurm/job-{job}.out").read_text()
    assert "restart 0 (0 by Slurm)" in log
    assert "restart 1 (1 by Slurm)" in log, "one log has both lives"


def test_F60_without_a_trap_the_same_signal_ends_the_job(slurm, tmp_path):
    """The failure itself: what the script is there for."""
    job = Job(slurm, tmp_path / "run", "wait", nodes=1)
    job.text = re.sub(r"^trap .*$", "", job.text, flags=re.MULTILINE)
    slurm.wait_for(job.submit(), "RUNNING")
    job.wait_for_starts(1)
    slurm.usr1(job.id)
    state, code, restarts = job.end()
    assert (state, code, restarts) == ("FAILED", "0:10", "0")
    assert len(job.events("start")) == 1


def test_F61_a_command_before_that_of_the_ranks_saves_and_a_pipe_does_not(slurm, tmp_path):
    """TERM for all processes of a task, as a preemption sends it: tee is gone before the trainer writes its last line."""
    with rejects("container", "bash -c", "shell"):
        SlurmConfig(container=("bash", "-c"))
    wrapper = tmp_path / "in container.sh"
    wrapper.write_text('#!/bin/bash\nexport INSIDE=1\nexec "$@"\n')
    wrapper.chmod(0o755)
    good = Job(slurm, tmp_path / "good", "wait 0", container=("env", "A=b c", str(wrapper)))
    bad = Job(slurm, tmp_path / "bad", "wait 0")
    line = next(
        line for line in bad.text.splitlines() if line.startswith("    ") and "trainer.py" in line
    )
    piped = f"    bash -c {shlex.quote(line.strip() + ' | tee ' + str(tmp_path / 'log'))}"
    bad.text = bad.text.replace(line, piped)
    for job in (good, bad):
        job.submit()
        job.wait_for_starts(1)
        slurm.run("scancel", "--signal=TERM", f"{job.id}.0")
    assert bad.end() == ("FAILED", "143:0", "0")
    assert good.end() == ("COMPLETED", "0:0", "1")
    assert [event["told"] for event in good.events("saved")] == [["SIGTERM"]]


def test_F62_a_save_before_the_end_is_no_success_and_codes_are_kept(slurm, tmp_path):
    """75 is the only code that continues: 0 would be COMPLETED with half of the steps."""
    half = Job(slurm, tmp_path / "half", "75 75 0")
    lost = Job(slurm, tmp_path / "lost", "65", nodes=1)
    stuck = Job(slurm, tmp_path / "stuck", "wait", nodes=1)
    stuck.text = stuck.text.replace(" wait\n", " 75 75 75\n").replace(
        "checkpoints/step-*", "nothing/step-*"
    )
    for job in (half, lost, stuck):
        job.submit()
    assert lost.end() == ("FAILED", "65:0", "0")
    assert half.end() == ("COMPLETED", "0:0", "2")
    assert [event["life"] for event in half.events("start") if event["rank"] == 0] == [0, 1, 2]
    assert stuck.end() == ("FAILED", "70:0", "1"), "no checkpoint twice"


def test_F100_preemption_and_an_administrator_requeue_once(slurm, tmp_path):
    """They send SIGTERM to the ranks, and to the shell too: nobody may requeue a second time, or kill the save."""
    job = Job(slurm, tmp_path / "run", "wait wait 0", nodes=2, tasks_per_node=2)
    job.submit()
    job.wait_for_starts(4)
    high = slurm.preempt()
    slurm.wait_for(high, "RUNNING")
    slurm.cancel(high)
    job.wait_for_starts(8)
    slurm.requeue(job.id)
    assert job.end() == ("COMPLETED", "0:0", "2")
    saved = job.events("saved")
    assert sorted((event["life"], event["rank"]) for event in saved) == [
        (i, r) for i in (0, 1) for r in range(4)
    ]
    assert "cannot be requeued" not in job.log()


def test_F191_a_stop_that_did_not_arrive_is_sent_again(slurm, tmp_path):
    """Without a way to munged srun cannot sign the message to the nodes: it says so, and drops the signal."""
    link, socket = tmp_path / "munge.socket", slurm.folder / "munge.socket"
    link.symlink_to(socket)
    conf = tmp_path / "slurm.conf"  # of the job's own commands; the daemons have theirs
    conf.write_text((slurm.folder / "slurm.conf").read_text().replace(str(socket), str(link)))
    prologue = (f"export SLURM_CONF={conf}", "echo $$ >shell")
    job = Job(slurm, tmp_path / "run", "wait 0", nodes=2, prologue=prologue)
    job.text = job.text.replace("read -t 30 ", "read -t 2 ")
    job.submit()
    job.wait_for_starts(2)
    link.unlink()
    os.kill(int((job.run / "shell").read_text()), signal.SIGUSR1)
    wait_until(lambda: job.log().count("Failure sending signal") == 2)
    link.symlink_to(socket)
    slurm.wait_for_end(job.id, seconds=30)
    assert job.end() == ("COMPLETED", "0:0", "1")
    assert len(job.events("saved")) == 2


@pytest.mark.parametrize("name", ["INT", "HUP"])
def test_F191_a_signal_for_the_shell_and_all_ranks_is_a_stop(slurm, tmp_path, name):
    """INT lets the ranks save; at a HUP srun itself kills them, and the next life begins with the checkpoint before."""
    job = Job(slurm, tmp_path / "run", "wait 0", nodes=2)
    job.submit()
    job.wait_for_starts(2)
    slurm.run("scancel", "--full", f"--signal={name}", job.id)
    assert job.end() == ("COMPLETED", "0:0", "1"), job.log()
    assert name == "HUP" or len(job.events("saved")) == 2


def test_a_cancelled_job_stays_cancelled(slurm, tmp_path):
    """Its ranks save and leave with 75, as always; a requeue would bring it back from the dead."""
    job = Job(slurm, tmp_path / "run", "wait", nodes=2)
    job.submit()
    job.wait_for_starts(2)
    slurm.cancel(job.id)
    wait_until(lambda: not slurm.run("squeue", "--noheader"), every=0.2)
    assert job.end()[0::2] == ("CANCELLED", "0")
    assert len(job.events("saved")) == 2
    assert "was cancelled" in job.log()


def test_a_job_goes_on_without_a_dead_node(slurm, tmp_path):
    """Its peers fail at once, minutes before Slurm knows: the script asks the nodes itself."""
    job = Job(slurm, tmp_path / "run", "wait 0", nodes=2)
    (tmp_path / "run/alive").touch()
    job.submit()
    job.wait_for_starts(2)
    other = next(event["node"] for event in job.events("start") if event["rank"] == 1)
    slurm.crash(other)
    (tmp_path / "run/gone").touch()
    (tmp_path / "run/alive").unlink()
    state, code, restarts = job.end()
    assert (state, code) == ("COMPLETED", "0:0")
    assert int(restarts) >= 1
    assert other not in {event["node"] for event in job.events("start") if event["life"] > 0}


def test_elements_of_an_array_and_sites_that_forbid_requeues(slurm, tmp_path):
    array = Job(
        slurm,
        tmp_path / "array",
        "75 0",
        array="3-4",
        array_run_dirs=True,
        array_arguments=("--of=%a",),
    )
    array.text = array.text.replace(
        "run/checkpoints", "run/../checkpoints"
    )  # the trainer's are above
    chain = Job(slurm, tmp_path / "chain", "75 75 0", on_stop="resubmit")
    for job in (array, chain):
        job.submit("--export=NONE") if job is chain else job.submit()
    wait_until(lambda: not slurm.run("squeue", "--noheader"), every=0.2)
    starts = sorted((event["element"], event["life"]) for event in array.events("start"))
    assert starts == [("3", 0), ("3", 1), ("4", 0), ("4", 1)]
    assert {event["argv"][-1] for event in array.events("start")} == {"--of=3", "--of=4"}
    assert [event["life"] for event in chain.events("start") if event["rank"] == 0] == [0, 1, 2]
    logs = sorted((chain.run / "slurm").glob("job-*.out"))
    assert len(logs) == 3, "a log for each job"
    assert "restart 2 (0 by Slurm)" in chain.log()


def test_F175_gpus_of_the_job_in_which_it_is_submitted_are_not_asked_for(slurm, tmp_path):
    """srun would ask for them, on nodes that have none: it fails as on a lost node, and the job is requeued for ever."""
    job = Job(slurm, tmp_path / "run", "0", nodes=2)
    job.submit("--export=ALL,SLURM_GPUS=4,SLURM_GPUS_PER_TASK=1,CUDA_VISIBLE_DEVICES=3")
    slurm.wait_for_end(job.id, seconds=40)
    assert job.end() == ("COMPLETED", "0:0", "0"), job.log()


def test_at_a_terminal(slurm, tmp_path):
    write_job(tmp_path, "[resilience]\nsave_limit_seconds = 30\n[slurm]\nnodes = 1\n")
    shown = submit_forge(slurm, tmp_path / "job.toml", "--interactive", "--dry_run")
    assert shown.out.startswith("# salloc --signal=USR1@90 --job-name=run --nodes=1")
    assert not (tmp_path / "run").exists()
    started = subprocess.run(
        [sys.executable, "-m", "forge_train", "slurm", str(tmp_path / "job.toml"), "--interactive"],
        env={**os.environ, **slurm.environ}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    assert "step 12/12" in started.stdout
    assert len(json.loads((tmp_path / "run/environment.json").read_text())["hosts"]) >= 1


_CRASH = """
import os
from forge_train import Callback

class Crash(Callback):
    def on_step_end(self, trainer):
        if trainer.progress.step == 7 and os.environ["RANK"] == "1" and not os.path.exists("crashed"):
            open("crashed", "w").close()
            os.abort()
"""


def test_a_supervisor_on_each_node_and_a_crash_in_one_of_them(slurm, tmp_path):
    """Neither supervisor can start the other's ranks again: the script starts both anew, in the same job."""
    (tmp_path / "my_crash.py").write_text(_CRASH)
    write_job(
        tmp_path,
        '[callbacks.crash]\nname = "my_crash:Crash"\n[resilience]\nsave_limit_seconds = 30\n[resilience.watch]\naction = '
        '"restart"\nlimits = { save = 300 }\n[slurm]\nnodes = 2\n'
        'environment = { MASTER_ADDR = "127.0.0.1" }\n',
    )
    job = submit_forge(slurm, "job.toml", "--submit", cwd=tmp_path).out.strip()
    assert slurm.wait_for_end(job) == "COMPLETED"
    log = (tmp_path / f"run/slurm/job-{job}.out").read_text()
    assert slurm.job(job)["Restarts"] == "0", log
    assert "retry 1 of 10" in log
    assert read_run(tmp_path / "run").metrics["step"] == list(range(1, 13))
    events = read_run(tmp_path / "run").events
    # the save of step 6 may still have been under way
    assert [event["step"] for event in events if event["event"] == "resume"] in ([3], [6])

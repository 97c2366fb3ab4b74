"""The batch script, run by bash itself: srun, scontrol and sbatch are small scripts that note how they were called."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_resilience.health import MISSING
from forge_resilience.slurm import (
    JobFacts,
    OrchestratorConfig,
    SlurmConfig,
    batch_script,
    clean_environ,
    controller,
    find_site,
    interactive_commands,
    job_warnings,
    jobs_of,
    limit_problem,
    orchestrator_command,
    read_site,
    replace_process,
    seconds_of,
    small_job,
    two_jobs,
)
from forge_resilience.slurm.script import expanded
from forge_resilience.slurm.site import site_path
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

# One rank in the place of all: options up to the command are noted.
_SRUN = """#!/bin/bash
echo "srun $*" >>"$CALLS"
while [[ $1 == -* ]]; do shift; done
[[ $1 != true ]] || exit "${LOST:-0}"
SLURM_PROCID=0 exec "$@"
"""
_NOTE = """#!/bin/bash
echo "${0##*/} $*" >>"$CALLS"
"""
_SAVE = 'step="$RUN/checkpoints/step-$RANDOM$RANDOM"; mkdir -p "$step"; touch "$step/manifest.json"'


@dataclass
class Site:
    """A folder with a run, and the programs of Slurm that a script calls."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)
    broken_nodes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, text in {
            "srun": _SRUN,
            "scontrol": _NOTE,
            "sbatch": _NOTE,
            "squeue": _NOTE,
        }.items():
            self.executable(f"bin/{name}", text)
        (self.run_dir / "slurm").mkdir(parents=True)

    @property
    def run_dir(self) -> Path:
        return self.folder / "a run"

    @property
    def facts(self) -> JobFacts:
        return JobFacts(
            str(self.run_dir),
            str(self.run_dir / "slurm/job.sh"),
            str(self.folder),
            save_limit_seconds=30,
            broken_nodes=self.broken_nodes,
        )

    def executable(self, name: str, text: str) -> str:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    def write(self, rank: str, **options: Any) -> None:
        """The script whose ranks run the shell text `rank`."""
        command = [self.executable("rank.sh", f"#!/bin/bash\n{rank}\n")]
        Path(self.facts.script).write_text(
            batch_script(SlurmConfig(**options), command, self.facts)
        )

    def start(self, log: Any = subprocess.PIPE, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", self.facts.script],
            # a shell's `&` has tests ignore it, and bash cannot trap what was ignored before
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
                "HOME": "/home/somebody",
                "CALLS": str(self.folder / "calls"),
                "RUN": str(self.run_dir),
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_JOB_NODELIST": "n[1-2]",
                **environ,
            },
        )

    def life(self, rank: str | None = None, **environ: str) -> tuple[int, str]:
        """(exit code, output) of one life."""
        if rank is not None:
            self.executable("rank.sh", f"#!/bin/bash\n{rank}\n")
        started = self.start(**environ)
        output, _ = started.communicate(timeout=60)
        return started.returncode, output

    def calls(self, program: str) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [
            line.removeprefix(f"{program} ") for line in lines if line.startswith(f"{program} ")
        ]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.lane("quick")
@pytest.mark.parametrize("code", [0, 1, 3, 65, 66, 70, 71, 76, 78])
def test_a_code_other_than_75_ends_the_job_with_it(site: Site, code: int) -> None:
    site.write(f"exit {code}")
    assert site.life()[0] == code
    assert site.calls("scontrol") == []


def test_F100_a_stopped_run_goes_back_into_the_queue(site: Site) -> None:
    site.write(f"{_SAVE}; exit 75")
    assert site.life()[0] == 75
    assert site.calls("scontrol") == ["requeue 7"]


def test_F65_restarts_are_counted_although_slurm_sets_no_count_at_first(site: Site) -> None:
    """`set -u` is on: a bare $SLURM_RESTART_COUNT would end the script."""
    site.write(f"{_SAVE}; exit 75", max_restarts=1)
    code, output = site.life()
    assert (code, "restart 0 (0 by Slurm)" in output) == (75, True)
    code, output = site.life(SLURM_RESTART_COUNT="1")
    assert code == 75
    assert "restart 1 (1 by Slurm)" in output
    assert "slurm.max_restarts" in output
    assert site.calls("scontrol") == ["requeue 7"], "the second stop is the last"
    code, output = site.life(SLURM_RESTART_COUNT="2")  # a node failed: Slurm asks nobody
    assert (code, "slurm.max_restarts" in output) == (75, True)
    assert len(site.calls("srun")) == 2


@pytest.mark.slow
def test_F60_a_signal_for_the_shell_reaches_the_ranks_and_the_shell_waits_for_them(
    site: Site,
) -> None:
    ready = site.folder / "ready"
    ranks = f"""
trap 'n=$((${{n:-0}} + 1))' USR1
touch '{ready}'
until [[ ${{n:-0}} -ge 3 ]]; do sleep 0.05; done
sleep 0.2; {_SAVE}; exit 75
"""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        site.write(ranks)
        ready.unlink(missing_ok=True)
        life = site.start()
        while not ready.exists():
            assert life.poll() is None
        while life.poll() is None:  # a storm: each ends the shell's wait
            life.send_signal(number)
            time.sleep(0.1)
        output, _ = life.communicate(timeout=30)
        assert life.returncode == 75, output
    assert site.calls("scontrol") == ["requeue 7"] * 2
    assert len(list(site.run_dir.glob("checkpoints/step-*"))) == 2


@pytest.mark.slow
def test_F128_no_signal_costs_the_code_of_the_ranks(site: Site) -> None:
    """bash may forget how a child ended when a trap interrupts its `wait`: one in ten of these lives had code -1."""
    ready = site.folder / "ready"
    site.write(
        f"trap 'n=1' USR1; touch '{ready}'; until [[ ${{n:-}} ]]; do sleep 0.001; done; {_SAVE}; exit 75"
    )
    for _ in range(40):
        ready.unlink(missing_ok=True)
        life = site.start(subprocess.DEVNULL)
        while not ready.exists() and life.poll() is None:
            time.sleep(0.001)
        while life.poll() is None:
            life.send_signal(signal.SIGUSR1)
            time.sleep(0.001)
        assert life.returncode == 75


@pytest.mark.parametrize("name", ["USR1", "TERM", "INT", "HUP"])
def test_F191_a_stop_is_sent_until_the_ranks_leave(site: Site, name: str) -> None:
    """A rank that misses the first USR1 stands for an srun that cannot send it; a real one is in tests/slurm."""
    ready = site.folder / "ready"
    site.write(
        f"trap 'n=$((${{n:-0}} + 1))' USR1; touch '{ready}'; until ((${{n:-0}} >= 2)); do sleep 0.02; done; {_SAVE}; exit 75"
    )
    script = Path(site.facts.script)
    script.write_text(script.read_text().replace("read -t 30 ", "read -t 0.1 "))
    life = site.start()
    while not ready.exists():
        assert life.poll() is None
    life.send_signal(signal.Signals[f"SIG{name}"])
    output, _ = life.communicate(timeout=60)
    assert life.returncode == 75, output
    assert site.calls("scontrol") == ["requeue 7"]


def test_a_signal_that_comes_before_the_ranks_is_remembered(site: Site) -> None:
    site.write("exit 3", prologue=("kill -USR1 $$",))
    code, output = site.life()
    assert (code, "by USR1 " in output) == (75, True)
    assert (site.calls("srun"), site.calls("scontrol")) == ([], ["requeue 7"])


def test_ranks_without_a_handler_yet_are_requeued_after_a_signal(site: Site) -> None:
    site.write(
        "kill -USR1 $(ps -o ppid= $PPID); sleep 0.3; kill -USR1 $$; sleep 9"
    )  # the shell that waits for srun is a child of the script's
    assert site.life()[0] == 75
    assert site.calls("scontrol") == ["requeue 7"]


def test_two_attempts_in_a_row_without_a_checkpoint_end_the_job(site: Site) -> None:
    site.write("exit 75")
    assert site.life()[0] == 75
    assert site.life(f"{_SAVE}; exit 75")[0] == 75, "a checkpoint counts anew"
    assert site.life("exit 75")[0] == 75
    code, output = site.life()
    assert code == 70
    assert "lives-7" in output, "the count that a new start finds"
    assert "JobFacts.checkpoints" in output
    assert len(site.calls("scontrol")) == 3


def test_attempts_that_a_node_failure_ended_count_too(site: Site) -> None:
    """Slurm requeues those itself: the next life finds out."""
    site.write("kill -KILL $(ps -o ppid= $PPID); exit 1")
    assert [site.life()[0] for _ in range(3)] == [-9, -9, 70]


@pytest.mark.lane("quick")
def test_attempts_that_lost_a_node_are_no_lack_of_progress(site: Site) -> None:
    """Slurm starts a job on a dead node again and again until it has noticed, after SlurmdTimeout."""
    site.write("exit 1")
    assert [site.life(LOST="1")[0] for _ in range(4)] == [75] * 4
    assert "restart 4 " in site.life("exit 0")[1], "they are counted against slurm.max_restarts"


def test_a_lost_node_is_requeued_and_a_crash_is_not(site: Site) -> None:
    site.write(f"{_SAVE}; exit 1")
    code, output = site.life(LOST="1")
    assert (code, "(code 1)" in output) == (75, True)
    code, output = site.life()
    assert (code, "slurm.retries" in output) == (1, True)
    assert site.life(LOST="1", SLURM_JOB_NUM_NODES="1")[0] == 1, "the shell runs on it"


def test_crashed_ranks_are_started_again_where_they_are(site: Site) -> None:
    site.write(f"{_SAVE}; [[ -e once ]] && exit 0; touch once; kill -SEGV $$", retries=1)
    code, output = site.life()
    assert (code, "code 139: " in output, "retry 1 of 1" in output) == (0, True, True)
    site.write(f"{_SAVE}; exit 65", retries=5)
    assert site.life()[0] == 65


def test_where_requeues_are_forbidden_the_next_job_is_submitted(site: Site) -> None:
    site.executable(
        "bin/sbatch", '#!/bin/bash\necho "sbatch $* ($FORGE_CHAIN, ${!SLURM_@})" >>"$CALLS"\n'
    )
    site.write(f"{_SAVE}; exit 75", on_stop="resubmit")
    assert site.life(SLURM_CONF="/etc/slurm.conf", SLURM_MEM_PER_NODE="5")[0] == 75
    code, output = site.life(SLURM_JOB_ID="8", FORGE_CHAIN="7")
    assert (code, "restart 1" in output) == (75, True), "one chain, one count"
    script = site.facts.script
    assert site.calls("sbatch") == [
        f"--dependency=afterany:7 -- {script} (7, SLURM_CONF)",
        f"--dependency=afterany:8 -- {script} (7, )",
    ]
    assert site.calls("scontrol") == []


_SHOW = """#!/bin/bash
[[ $1 == --oneliner ]] && { echo "JobId=7 ReqNodeList=(null) ExcNodeList=${EXCLUDED:-(null)} NodeList=n[1-2]"; exit; }
echo "scontrol $*" >>"$CALLS"
"""


@pytest.mark.lane("quick")
@pytest.mark.parametrize(("before", "all_of_them"), [("(null)", "n2,n4"), ("n9", "n9,n2,n4")])
@pytest.mark.parametrize("on_stop", ["requeue", "resubmit"])
def test_71_goes_on_without_the_nodes_that_are_broken(
    site: Site, on_stop: str, before: str, all_of_them: str
) -> None:
    site.executable("bin/scontrol", _SHOW)
    find = '#!/bin/bash\n[[ $2 == "$RUN" ]] && echo "$1"\n'
    site.broken_nodes = (site.executable("find broken.sh", find), "n2,n4")
    site.write("exit 71", on_stop=on_stop)
    code, output = site.life(EXCLUDED=before)
    assert (code, "n2,n4 is broken" in output) == (75, True)
    if on_stop == "requeue":
        excluded = f"update JobId=7 ExcNodeList={all_of_them}"
        assert site.calls("scontrol") == ["requeue 7", excluded]
    else:
        options = f"--dependency=afterany:7 --exclude={all_of_them}"
        assert site.calls("sbatch") == [f"{options} -- {site.facts.script}"]


@pytest.mark.parametrize("text", ["exit 1", "exit 0"])
def test_71_ends_the_job_where_no_node_is_known_to_be_broken(site: Site, text: str) -> None:
    site.broken_nodes = (site.executable("find.sh", f"#!/bin/bash\n{text}\n"),)
    site.write("exit 71")
    code, output = site.life()
    assert (code, "code 71" in output) == (71, True)
    assert site.calls("scontrol") == []


def test_an_element_of_an_array_requeues_only_itself(site: Site) -> None:
    """Its own job id is that of the whole array when it is the last one."""
    element = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    site.write(
        'echo "said $1"; RUN+=/task-3; ' + f"{_SAVE}; exit 75",
        array="0-3", array_run_dirs=True, array_arguments=("--name=it's %a of $n",),
    )  # fmt: skip
    code, output = site.life(**element)
    assert (code, "said --name=it's 3 of $n" in output) == (75, True)
    assert site.calls("scontrol") == ["requeue 7_3"]
    assert site.life(**element)[0] == site.life(**element)[0] == 75, (
        "its own folder has the checkpoints"
    )


def test_arguments_reach_the_ranks_unchanged_except_marked_variables(site: Site) -> None:
    words = ["a b", 'quo"te', "it's", "$HOME", "`id`", "back\\slash", "*", "", "--x=1 2"]
    show = site.executable(
        "show.py", f"#!{sys.executable}\nimport os, sys\nprint([sys.argv[1:], os.environ['SEEN']])"
    )
    config = SlurmConfig(
        container=("env", 'A=${HOME}/`id` $(id) "\\'),
        environment={"SEEN": "$HOME/b c"},
        srun_options=("--cpu-bind=map_cpu:$HOME",),
    )
    Path(site.facts.script).write_text(batch_script(config, [show, *words], site.facts))
    code, output = site.life()
    assert code == 0, output
    assert str([words, "/home/somebody/b c"]) in output
    (call,) = site.calls("srun")
    assert "--cpu-bind=map_cpu:/home/somebody" in call
    assert 'A=/home/somebody/`id` $(id) "\\' in call


def test_directives_are_quoted_for_sbatch(tmp_path: Path) -> None:
    facts = JobFacts('/r/50% "of" it', '/r/50% "of" it/slurm/job.sh', "/")
    text = batch_script(SlurmConfig(), ["true"], facts)
    assert '#SBATCH --job-name="50% \\"of\\" it"' in text
    assert '#SBATCH --output="/r/50%% \\"of\\" it/slurm/job-%j.out"' in text


def test_what_is_asked_of_slurm(site: Site) -> None:
    config = SlurmConfig(
        nodes="3-4", gpus_per_node=8, gpus_option="--gres=gpu:h100:{gpus}", cpus_per_task=12, memory="0",
        time_limit="1-00:00:00", partition="gpu", account="lab", qos="long", job_name="x", mail_user="a@b.c",
        mail_type="END,FAIL", array="1-9%1", sbatch_options=("--exclude=n7", "--exclusive"),
    )  # fmt: skip
    lines = batch_script(config, ["true"], site.facts).splitlines()
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert asked >= {
        "--nodes=3-4", "--ntasks-per-node=8", "--gres=gpu:h100:8", "--cpus-per-task=12", "--mem=0",
        "--time=1-00:00:00", "--partition=gpu", "--account=lab", "--qos=long", "--job-name=x", "--mail-user=a@b.c",
        "--mail-type=END,FAIL", "--array=1-9%1", "--exclude=n7", "--exclusive", "--requeue", "--open-mode=append",
        "--signal=B:USR1@90",
    }  # fmt: skip
    text = "\n".join(lines)
    assert "--ntasks=$((SLURM_JOB_NUM_NODES * 8))" in text, "not the fewest nodes"
    assert "--cpus-per-task=12 " in text[text.index("exec srun") :], "for srun, too"
    assert "export OMP_NUM_THREADS=12" in text


def test_a_supervisor_on_each_node_starts_its_ranks(site: Site) -> None:
    facts = replace(site.facts, supervisor=("echo", "watch", "--action=restart"))
    config = SlurmConfig(
        tasks_per_node=4,
        cpus_per_task=3,
        container=("env",),
        array="1-2%1",
        array_arguments=("-%a",),
    )
    Path(facts.script).write_text(batch_script(config, ["train me"], facts))
    code, output = site.life(SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2")
    assert (code, "watch --action=restart --nproc 4 -- train me -2\n" in output) == (0, True), (
        output
    )
    (call,) = site.calls("srun")
    assert "--ntasks=2 --ntasks-per-node=1 --cpus-per-task=12 env echo" in call


def test_every_variable_has_its_reason_in_the_line_before(site: Site) -> None:
    config = SlurmConfig(cpus_per_task=2, cache_dir="$SCRATCH/cache")
    lines = batch_script(config, ["true"], site.facts).splitlines()
    named = [
        i
        for i, line in enumerate(lines)
        if line.startswith(("export ", "unset ")) and "CHAIN" not in line
    ]
    assert len(named) >= 6
    for i in named:
        before = (
            i - 1 if not lines[i - 1].startswith("export TORCHINDUCTOR") else i - 2
        )  # two share one
        assert lines[before].startswith("# "), lines[i]
    assert 'export TRITON_CACHE_DIR="$SCRATCH/cache"/triton' in lines


def test_at_a_terminal_it_is_salloc_with_the_same_options(site: Site) -> None:
    config = SlurmConfig(nodes=2, partition="gpu", time_limit=30, environment={"A": "b"})
    salloc, text = interactive_commands(config, ["echo", "a b"], site.facts)
    assert shlex.join(salloc).startswith("salloc --signal=USR1@90 '--job-name=a run' --nodes=2")
    assert salloc[-2:] == ["bash", str(site.run_dir / "slurm/interactive.sh")]
    Path(salloc[-1]).write_text(text)
    done = subprocess.run(
        salloc[-2:],
        env={"PATH": f"{site.folder}/bin:{os.environ['PATH']}", "CALLS": str(site.folder / "calls"),
             "SLURM_JOB_NUM_NODES": "2"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "a b\n"), done.stderr


def test_a_rank_that_was_killed_after_the_others_does_not_hide_their_code(site: Site) -> None:
    """srun returns the highest code: 143 of a rank that it ended because another had left with 75."""
    for code, state in ((75, 75), (78, 78)):
        left = f"srun: error: n2: tasks 1,3-4: Exited with exit code {code}"  # prose: srun's words
        site.write(f"{_SAVE}; echo '{left}'; echo 'srun: error: n1: task 0: Terminated'; exit 143")
        with (site.folder / "log").open("ab") as log:
            log.write(b"srun: error: n1: task 0: Exited with exit code 1\n")  # of the life before
            life = site.start(log)
            assert life.wait(timeout=60) == state
    assert site.calls("scontrol") == ["requeue 7"]


@pytest.mark.lane("quick")
@pytest.mark.parametrize("on_stop", ["requeue", "resubmit"])
@pytest.mark.parametrize(
    ("reason", "preempted", "goes_on"),
    [
        ("None", "None", False),
        ("None", "2020-01-01T00:00:00", False),  # in an earlier life
        ("None", "2999-01-01T00:00:00", True),
        ("TimeLimit", "None", True),
    ],
)
def test_a_cancelled_job_stays_cancelled(
    site: Site, on_stop: str, reason: str, preempted: str, goes_on: bool
) -> None:
    """scancel sends SIGTERM, ranks save and leave with 75; scontrol requeue would bring the job back."""
    site.write(f"{_SAVE}; exit 75", on_stop=on_stop)
    site.executable("bin/squeue", f"#!/bin/bash\necho 'COMPLETING|{reason}'\n")
    site.executable(
        "bin/scontrol",
        '#!/bin/bash\n[[ $1 == show ]] || echo "scontrol $*" >>"$CALLS"\n'
        f"echo 'JobId=7 PreemptEligibleTime=2998-01-01T00:00:00 PreemptTime={preempted} SuspendTime=None'\n",
    )
    assert site.life()[0] == 75
    assert len(site.calls("scontrol") + site.calls("sbatch")) == goes_on


def test_a_controller_that_restarts_is_waited_for_and_one_that_rejects_is_named(site: Site) -> None:
    site.write(f"{_SAVE}; exit 75")
    site.executable("bin/sleep", "#!/bin/bash\ntouch later\n")
    site.executable(
        "bin/scontrol",
        '#!/bin/bash\n[[ -e later ]] && echo "scontrol $*" >>"$CALLS" || { echo "no contact"; exit 1; }\n',
    )
    code, output = site.life()
    assert (code, "slurm.on_stop" in output) == (75, False)
    assert site.calls("scontrol") == ["requeue 7"]
    site.executable(
        "bin/scontrol", '#!/bin/bash\n[[ $1 == ping ]] || { echo "disabled for job 7"; exit 1; }\n'
    )
    assert re.search(r"\(disabled for job 7\).* slurm\.on_stop ", site.life()[1])


@pytest.mark.parametrize(
    ("options", "key", "value", "code"),
    [
        ({"nodes": "4-3"}, "nodes", "4-3", "format"),
        ({"nodes": 0}, "nodes", 0, "format"),
        ({"on_stop": "reque"}, "on_stop", "reque", "unknown"),
        ({"tasks_per_node": 0}, "tasks_per_node", 0, "range"),
        ({"time_limit": "soon"}, "time_limit", "soon", "format"),
        ({"partition": "gpu --exclusive"}, "partition", "gpu --exclusive", "word"),
        ({"job_name": "a\nb"}, "job_name", "a\nb", "line"),
        ({"gpus_option": "--gpus=8"}, "gpus_option", "--gpus=8", "placeholder"),
        ({"environment": {"A-B": "1"}}, "environment.A-B", ..., "name"),
        ({"mail_type": "END"}, "mail_type", "END", "requires"),
        ({"sbatch_options": ("--nodes=3",)}, "sbatch_options", "--nodes=3", "owned"),
        ({"sbatch_options": ("--signal=USR1@5",)}, "sbatch_options", "--signal=USR1@5", "owned"),
        ({"sbatch_options": ("hetjob",)}, "sbatch_options", "hetjob", "heterogeneous"),
        ({"srun_options": ("--het-group=1",)}, "srun_options", "--het-group=1", "heterogeneous"),
        ({"srun_options": ("cores",)}, "srun_options", "cores", "dash"),
        ({"srun_options": ("--export=NONE",)}, "srun_options", "--export=NONE", "owned"),
        ({"container": ("bash", "-c")}, "container", "bash -c", "shell"),
        ({"container": ("env", "|", "tee")}, "container", ["env", "|", "tee"], "pipe"),
        ({"array": "x"}, "array", "x", "format"),
        ({"array": "0-3"}, "array", "0-3", "run_dirs"),
        ({"array_run_dirs": True}, "array_run_dirs", True, "requires"),
    ],
)
def test_invalid_arguments_are_rejected(
    options: dict[str, Any], key: str, value: Any, code: str
) -> None:
    with rejects(key, value, code):
        SlurmConfig(**options)


@pytest.mark.parametrize("more", ["{y}", "{", "}", "{gpus!r}", "{gpus:9}"])
def test_F195_an_option_for_gpus_has_no_other_braces(more: str) -> None:
    with rejects("gpus_option", f"--x={{gpus}}{more}", "placeholder"):
        SlurmConfig(gpus_option=f"--x={{gpus}}{more}")


def test_a_path_that_no_node_could_find_is_rejected() -> None:
    wrong = {"run_dir": "runs/a", "script": "/a\nb", "save_limit_seconds": 1e6}
    with rejects("run_dir", "runs/a", "path") as caught:
        JobFacts(**wrong, working_dir="/w", checkpoints="/step-*")
    for problem in (
        ("script", "/a\nb", "path"),
        ("checkpoints", "/step-*", "pattern"),
        ("save_limit_seconds", 1e6, "range"),
    ):
        assert_problem(caught.value, *problem)


def test_a_limit_that_leaves_no_time_and_an_array_at_a_terminal_are_rejected(site: Site) -> None:
    with rejects("time_limit", "1:30", "lead"):
        batch_script(SlurmConfig(time_limit="1:30"), ["true"], site.facts)
    for command, shown, code in (
        ("python train.py", "python train.py", "type"),
        (["torchrun", "train.py"], "torchrun train.py", "launcher"),
    ):
        with rejects("command", shown, code):
            batch_script(SlurmConfig(gpus_per_node=2), command, site.facts)
    assert batch_script(SlurmConfig(), ["torchrun", "train.py"], site.facts)
    with rejects("array", "1-2%1", "unsupported"):
        interactive_commands(SlurmConfig(array="1-2%1"), ["true"], site.facts)


def test_F193_a_job_of_an_orchestrator_writes_its_end_into_any_folder(site: Site) -> None:
    site.write("exit 65", on_stop="leave")
    code, output = site.life()
    assert (code, "trap" in output) == (65, False), output
    assert (site.run_dir / "slurm/ends-7").read_text() == "7 65\n"


_SHOW_GPUS = 'echo "GPUs: $CUDA_VISIBLE_DEVICES.$ROCR_VISIBLE_DEVICES.$SLURM_GPUS.$SLURM_GRES.$SLURM_GPUS_PER_NODE.$SLURM_GPU_BIND."'


def test_F175_gpus_of_the_job_in_which_this_one_was_submitted_are_not_its(site: Site) -> None:
    """Those that this job asks for have variables of the same names, which srun needs."""
    outer = {"CUDA_VISIBLE_DEVICES": "3", "ROCR_VISIBLE_DEVICES": "3", "SLURM_GPUS": "1", "SLURM_GRES": "gpu:1",
             "SLURM_GPUS_PER_NODE": "4", "SLURM_GPU_BIND": "closest"}  # fmt: skip
    site.write(_SHOW_GPUS, gpus_per_node=0)
    assert "GPUs: ......" in site.life(**outer)[1]
    site.write(_SHOW_GPUS, gpus_per_node=4, sbatch_options=("--gpu-bind=closest",))
    assert "GPUs: ....4.closest." in site.life(**outer)[1]


def test_a_site_that_is_not_there_or_holds_something_else_is_rejected(tmp_path: Path) -> None:
    with rejects("--site", "./none.toml", "not_found"):
        find_site("./none.toml", environ={})
    with rejects("FORGE_SITE", "./none.toml", "not_found"):
        find_site(environ={"FORGE_SITE": "./none.toml"})
    path = tmp_path / "site.toml"
    path.write_text("slurm = 3\n")
    with rejects("", ["slurm"], "tables", where=path):
        read_site(path)
    path.write_text("[slurm\n")
    with rejects("", ..., "damaged", where=path):
        read_site(path)


def test_a_partition_whose_own_limit_leaves_no_time_needs_one_of_the_job(monkeypatch) -> None:
    rows = [{"PartitionName": "low", "DefaultTime": "00:05:00"}]
    monkeypatch.setattr("forge_resilience.slurm.site._partitions", lambda partition: rows)
    assert limit_problem(299) is None
    problem = limit_problem(300)
    assert_problem(SimpleNamespace(problems=[problem]), "time_limit", ..., "missing")
    assert "low" in problem.rule
    assert "00:05:00" in problem.rule


def test_time_limits_are_read_as_slurm_reads_them() -> None:
    cases = {
        90: 5400,
        "90": 5400,
        "90:30": 5430,
        "1:30:30": 5430,
        "1-12": 129600,
        "1-1:30": 91800,
        "2-0:0:5": 172805,
    }
    assert {limit: seconds_of(limit) for limit in cases} == cases
    assert seconds_of("UNLIMITED") is None


def test_a_job_inside_a_job_gets_none_of_its_variables() -> None:
    inside = {
        "SLURM_JOB_ID": "1",
        "SLURM_MEM_PER_CPU": "5",
        "SLURM_CONF": "c",
        "PATH": "p",
        "FORGE_CHAIN": "1",
    }
    assert clean_environ(inside) == {"SLURM_CONF": "c", "PATH": "p"}


def test_importing_it_costs_no_torch() -> None:
    seen = "import sys, forge_resilience.slurm; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_F149_a_leading_tilde_is_the_home_folder_in_words_of_bash_and_sites(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    for text, wanted in {"~/[a]*": "/home/ada/[a]*", "~ada/x": "~ada/x", "$HOME/x": "/home/ada/x"}.items():  # fmt: skip
        done = subprocess.run(["bash", "-c", f"echo -n {expanded(text)}"], capture_output=True, text=True)  # fmt: skip
        assert done.stdout == wanted
    assert site_path("~/my/site.toml") == Path("/home/ada/my/site.toml")
    assert site_path("hpc1") == Path("/home/ada/.config/forge/hpc1.toml")
    assert site_path("~ada/site.toml") == Path("~ada/site.toml")


def test_a_small_job_orchestrates_in_the_surroundings_of_the_job() -> None:
    own = OrchestratorConfig(wait_seconds=7, time_limit=9)
    config = SlurmConfig(
        nodes=4, gpus_per_node=8, account="a", prologue=("echo",), max_restarts=3, orchestrator=own
    )
    small = small_job(config)
    assert (small.nodes, small.ranks_per_node, small.gpus_per_node) == (1, 1, 0)
    assert (small.account, small.prologue, small.time_limit) == ("a", ("echo",), 9)
    words = orchestrator_command(config, "/r/job.sh", [4, 2], "name", "/r/events.jsonl")
    flags = dict(zip(words[4::2], words[5::2]))
    assert words[1:4] == ["-m", "forge_resilience.slurm", "/r/job.sh"]
    assert (flags["--sizes"], flags["--max-restarts"], flags["--wait-seconds"]) == ("4,2", "3", "7")


def test_F175_a_job_without_gpus_lists_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for config, count in (
        (SlurmConfig(nodes="2-3"), 1),
        (SlurmConfig(gpus_per_node=1), 0),
        (SlurmConfig(sbatch_options=("--gres=gpu:1",)), 0),
    ):
        assert len(job_warnings(config, 60)) == count, config


def test_what_is_not_on_this_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert (controller().state, jobs_of("/r/job.sh")) == (MISSING, [])
    with pytest.raises(RuntimeError, match="salloc_1"):
        replace_process(["salloc_1"])
    (problem,) = two_jobs("run.dir", "/r", [("7", "PENDING")])
    assert (problem.key, problem.code, problem.value) == ("run.dir", "queued", "/r")

"""A Slurm of our own: loopback only, nodes n1 to n4 that are this machine, and all that can happen to them.

    with running_cluster(folder) as slurm:
        job = slurm.sbatch("script.sh")
        slurm.wait_for(job, "RUNNING")
        slurm.crash("n2")

Partition `low` is the default; a job in `high` on the same nodes preempts its jobs: they get SIGTERM, GRACE
seconds, and are requeued. Partition `cpu` has a node of its own, `c1`. All files are in `folder`, all daemons
end with the process that started them, also when it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.slurm import watch

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged")
NODES = ("n1", "n2", "n3", "n4")
CPU_NODE = "c1"
GRACE = 30
KILL_WAIT = 10
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
_PR_SET_PDEATHSIG = 1

_CONF = """
ClusterName=forge
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# a requeued job waits until its old credential has expired: 120 s unless said, 5 s at least
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
# a node that was down is back as soon as its slurmd is
ReturnToService=2
# a node that crashes is down within 8 s (26 s with SlurmdTimeout=6 and the usual MessageTimeout of 10)
SlurmdTimeout=4
MessageTimeout=4
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=1,sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
MinJobAge=300
# ranks meet at a port made of the job's id: jobs of another cluster on this machine have other ids
FirstJobId={first_job}
CompleteWait=0
KillWait={kill_wait}
{nodes}
PartitionName=low Nodes={low} Default=YES DefaultTime=5 MaxTime=60 State=UP PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes={low} DefaultTime=5 MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=cpu Nodes={cpu} DefaultTime=5 MaxTime=60 State=UP PriorityTier=1 PreemptMode=OFF
"""


class Slurm:
    """A running cluster. `run("sbatch", ...)` is a client command; `folder` is a place for files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "PATH": _PATH,
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._hidden: dict[str, Path] = {}

    # ---- jobs

    def run(self, *command: str | Path) -> str:
        """Output of a client command; AssertionError with its stderr if it fails."""
        done = subprocess.run(
            list(map(str, command)),
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def sbatch(self, *arguments: str | Path) -> str:
        """Submit a job; its id."""
        return self.run("sbatch", "--parsable", *arguments).strip()

    def submit(self, *arguments: str | Path) -> None:
        """Run an sbatch script to its end, requeues included (`sbatch --wait` looks every half minute)."""
        job = self.sbatch(*arguments)
        wait_until(lambda: not self.run("squeue", "--noheader", f"--jobs={job}"), every=0.2)

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of it: JobState, Restarts, NodeList, ExitCode, ..."""
        words = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(re.findall(r"(\S+?)=(.*?)(?=\s+\S+=|\s*$)", words, re.MULTILINE))

    def wait_for(self, job: str, *states: str, seconds: float = 120.0) -> str:
        """Wait until the job is in one of the states, such as RUNNING; the state."""
        wait_until(lambda: self.job(job)["JobState"] in states, seconds, every=0.1)
        return self.job(job)["JobState"]

    def wait_for_end(self, job: str, seconds: float = 300.0) -> str:
        """Wait until the job has left for good; its state."""
        return self.wait_for(
            job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", seconds=seconds
        )

    def usr1(self, job: str) -> None:
        """USR1 to the batch shell alone, as `--signal=B:USR1@...` sends it before the time limit."""
        self.run("scancel", "--signal=USR1", "--batch", job)

    def requeue(self, job: str) -> None:
        """What an administrator does; the job gets SIGTERM, and SIGKILL after KILL_WAIT seconds."""
        self.run("scontrol", "requeue", job)

    def preempt(self, *options: str) -> str:
        """Submit an exclusive job of the partition `high`, by default on all nodes; cancel it to give them back."""
        where = options or (f"--nodes={len(NODES)}",)
        return self.sbatch("--partition=high", "--exclusive", "--output=/dev/null", *where,
                           "--wrap=exec sleep 600")  # fmt: skip

    def cancel(self, *jobs: str) -> None:
        self.run("scancel", *jobs)

    # ---- nodes and the controller

    def nodes(self) -> dict[str, str]:
        """State of each node, such as idle, mixed, down*, drained."""
        rows = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(row.split() for row in rows)

    def idle(self) -> list[str]:
        return sorted(node for node, state in self.nodes().items() if state == "idle")

    def drain(self, *nodes: str) -> None:
        """Jobs on the nodes go on, new ones do not start there."""
        names = ",".join(nodes)
        self.run("scontrol", "update", f"NodeName={names}", "State=DRAIN", "Reason=a test")

    def resume(self, *nodes: str) -> None:
        """Return drained nodes."""
        self.run("scontrol", "update", f"NodeName={','.join(nodes)}", "State=RESUME")
        self._wait_until_usable(*nodes)

    def crash(self, node: str) -> None:
        """SIGKILL the node's slurmd, step daemons and their tasks, the batch script among them.

        The controller notices after SlurmdTimeout; `wait_until_down` waits for that.
        """
        slurmd = self._daemons.pop(f"slurmd.{node}")
        doomed = watch.with_descendants([slurmd.pid, *self._step_daemons(node)])
        # all at one instant: none may report the death of another
        watch.kill(doomed, signal.SIGSTOP)
        # Children first: a stopped process group whose parent dies gets HUP and CONT of the kernel, and srun then asks
        # for the end of its step. The controller keeps that for the dead node, and ends the step of the next life.
        watch.kill(reversed(doomed))
        slurmd.wait()

    def wait_until_down(self, node: str) -> None:
        wait_until(lambda: self.nodes()[node].startswith("down"), every=0.2)

    def revive(self, node: str) -> None:
        """Start the slurmd of a crashed node, and wait until jobs may start there."""
        self._slurmd(node)
        self._wait_until_usable(node)

    @contextlib.contextmanager
    def hidden(self, node: str, folder: Path) -> Iterator[None]:
        """A node that lacks a shared file system: its jobs find an empty folder in place of `folder`."""
        self._restart_slurmd(node, folder)
        try:
            yield
        finally:
            self._restart_slurmd(node, None)

    def restart_controller(self, crash: bool = False) -> None:
        """End slurmctld, by SIGTERM or SIGKILL, and start it again with the state that it has saved.

        It saves what it was told within 5 seconds and at SIGTERM: a crash forgets jobs that are younger.
        """
        controller = self._daemons.pop("slurmctld")
        controller.send_signal(signal.SIGKILL if crash else signal.SIGTERM)
        controller.wait()
        self._daemon("slurmctld", "-D", "-f", f"{self.folder}/slurm.conf")
        wait_until(lambda: "is UP" in self._quietly("scontrol", "ping"))

    def tidy(self) -> None:
        """Cancel all jobs, start crashed nodes and return drained ones, for the next test."""
        if self._quietly("squeue", "--noheader"):
            self.run("scancel", "--user=root")
            wait_until(lambda: not self.run("squeue", "--noheader"), every=0.1)
        for node in (*NODES, CPU_NODE):
            if f"slurmd.{node}" not in self._daemons:
                self.revive(node)
        asleep = [node for node, state in self.nodes().items() if state.startswith(("dr", "down"))]
        if asleep:
            self.resume(*asleep)
        wait_until(lambda: len(self.idle()) == len(NODES) + 1, every=0.1)

    # ---- start and stop

    def start(self) -> None:
        self._write_conf()
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={self.folder}/munge.key",
            f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munge.seed",
        )
        wait_until((self.folder / "munge.socket").exists)
        self._daemon("slurmctld", "-D", "-c", "-f", f"{self.folder}/slurm.conf")
        for node in (*NODES, CPU_NODE):
            self._slurmd(node)
        idle = ("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N")
        wait_until(lambda: len(set(self._quietly(*idle).split())) == len(NODES) + 1)

    def stop(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root")
            wait_until(lambda: not self.run("squeue", "--noheader"), seconds=15)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=10)
        watch.kill_all(self.folder)
        for daemon in self._daemons.values():
            daemon.wait()

    def _quietly(self, *command: str) -> str:
        """Output of a client command, empty when the controller does not answer."""
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=90
        ).stdout

    def _wait_until_usable(self, *nodes: str) -> None:
        """`idle*` after a return means that the controller has not heard the slurmd since."""
        usable = ("idle", "mixed", "allocated")
        wait_until(lambda: all(self.nodes()[node] in usable for node in nodes), every=0.1)

    def _step_daemons(self, node: str) -> list[int]:
        """Each listens on a socket in its node's spool folder."""
        spool = f"{self.folder}/spool-{node}/"
        rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()]
        inodes = {f"socket:[{row[6]}]" for row in rows if len(row) > 7 and row[7].startswith(spool)}
        return [pid for pid in watch.processes_of(self.folder) if inodes & _open_files(pid)]

    def _restart_slurmd(self, node: str, hidden: Path | None) -> None:
        slurmd = self._daemons.pop(f"slurmd.{node}")
        slurmd.terminate()
        slurmd.wait()
        if hidden is None:
            self._hidden.pop(node)
        else:
            self._hidden[node] = hidden
        self.revive(node)

    def _slurmd(self, node: str) -> None:
        daemon = ["slurmd", "-D", "-N", node, "-f", f"{self.folder}/slurm.conf"]
        if node in self._hidden:  # an empty file system over the folder, seen by this slurmd alone
            over = f'mount -t tmpfs none "{self._hidden[node]}" && exec "$@"'
            daemon = [
                "unshare",
                "--mount",
                "--propagation=private",
                "sh",
                "-c",
                over,
                "sh",
                *daemon,
            ]
        self._daemon(*daemon, name=f"slurmd.{node}")

    def _write_conf(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (self.folder / "state").mkdir()
        host = socket.gethostname().split(".")[0]
        names = (*NODES, CPU_NODE)
        controller, *ports = free_ports(len(names) + 1)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
            for name, port in zip(names, ports)
        )
        text = _CONF.format(folder=self.folder, host=host, controller=controller, nodes=nodes,
                            low=",".join(NODES), cpu=CPU_NODE, grace=GRACE, kill_wait=KILL_WAIT,
                            first_job=random.randrange(1, 10**6))  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)

    def _daemon(self, program: str, *arguments: str, name: str | None = None) -> None:
        name = name or program
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [shutil.which(program, path=_PATH) or program, *arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[Slurm]:
    """A cluster with its files in `folder`, which is there; RuntimeError where none can run (`why_not`)."""
    if reason := why_not():
        raise RuntimeError(reason)
    for parent in (folder, *folder.parents[:2]):  # munged refuses a socket that nobody may reach
        parent.chmod(parent.stat().st_mode | 0o011)
    watcher = subprocess.Popen(
        [sys.executable, "-S", "-E", watch.__file__, str(os.getpid()), str(folder)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        watcher.kill()
        watcher.wait()


def why_not() -> str | None:
    """Why no Slurm can run here; None if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"a real Slurm needs {', '.join(missing)}: install slurmctld, slurmd, munge"
    if os.geteuid() != 0:
        return "a real Slurm on one machine needs root to start tasks"
    return None


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [found.getsockname()[1] for found in sockets]


def wait_until(true: Callable[[], object], seconds: float = 90.0, every: float = 0.05) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, true
        time.sleep(every)


def _open_files(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry.path))
    return found


def _end_with_parent() -> Callable[[], None]:
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

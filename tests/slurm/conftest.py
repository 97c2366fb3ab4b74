"""A Slurm of our own for the tests of this folder: loopback only, two nodes that are this machine.

Needs `slurmctld`, `slurmd`, `srun`, `sbatch`, `scontrol` and `munged` installed and root (a slurmd that
starts tasks wants it); the tests are skipped with that reason otherwise. All files lie in a temporary folder and
all daemons end with the session, also when it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged")
NODES = 2
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
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=1,sched_interval=1,batch_sched_delay=0
JobRequeue=1
MinJobAge=300
CompleteWait=0
KillWait=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=5 State=UP
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
        self._daemons: list[subprocess.Popen[bytes]] = []

    def run(self, *command: str | Path) -> str:
        done = subprocess.run(
            list(map(str, command)),
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, *arguments: str | Path) -> None:
        """Run an sbatch script to its end, requeues included (`sbatch --wait` looks every half minute)."""
        job = self.run("sbatch", "--parsable", *arguments).strip()
        wait_until(lambda: not self.run("squeue", "--noheader", f"--jobs={job}"), every=0.2)

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
        for node in range(1, NODES + 1):
            self._daemon("slurmd", "-D", "-N", f"n{node}", "-f", f"{self.folder}/slurm.conf")
        wait_until(lambda: self._idle() == NODES)

    def stop(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root")
            wait_until(lambda: not self.run("squeue", "--noheader"), seconds=15)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _idle(self) -> int:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"],
            env=self.environ,
            capture_output=True,
            text=True,
        )
        return len(done.stdout.split())

    def _write_conf(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (self.folder / "state").mkdir()
        host = socket.gethostname().split(".")[0]
        controller, *ports = free_ports(NODES + 1)
        nodes = "\n".join(
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
            for number, port in enumerate(ports, 1)
        )
        text = _CONF.format(folder=self.folder, host=host, controller=controller, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)

    def _daemon(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}-{len(self._daemons)}.out").open("wb") as log:
            daemon = subprocess.Popen(
                [shutil.which(name, path=_PATH) or name, *arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )
        self._daemons.append(daemon)


def _end_with_parent() -> Callable[[], None]:
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [found.getsockname()[1] for found in sockets]


def wait_until(true: Callable[[], object], seconds: float = 90.0, every: float = 0.05) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, true
        time.sleep(every)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A real Slurm of two nodes on this machine."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        pytest.skip(f"a real Slurm needs {', '.join(missing)}: install slurmctld, slurmd, munge")
    if os.geteuid() != 0:
        pytest.skip("a real Slurm on one machine needs root to start tasks")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents[:2]):  # munged refuses a socket that nobody may reach
        parent.chmod(parent.stat().st_mode | 0o011)
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()

# Copied from scripts/shared/launch.py; edit that file, then run scripts/copy_shared.py.
"""Contract of launchers and ranks: Forge's variables, and the address and port that all tasks of a Slurm step compute.

address = first_address(os.environ["SLURM_STEP_NODELIST"])
port = step_port(job=1234, step=0, restarts=0)
"""

from __future__ import annotations

import re
import socket
import subprocess

from .problems import invalid

LOOPBACK = "127.0.0.1"
STORE_FD = "FORGE_STORE_FD"
"""Set by a launcher on this host: rank 0 gets the descriptor of a socket that listens on MASTER_PORT, others ""."""
RUN_NAME = "FORGE_RUN_NAME"
"""Set by a launcher to a new random name, the same on all ranks, under which they exchange what they check; ranks started
by hand may have one too."""
_PORTS = (20000, 10007)  # the first, and how many: below Linux's ephemeral ports, a prime


def step_port(job: int, step: int, restarts: int) -> int:
    """Port of a step; another one for each job, step and requeue.

    `job` is SLURM_JOB_ID, which differs between the elements of an array. `restarts` is SLURM_RESTART_COUNT, which is
    unset until the first requeue.
    """
    first, count = _PORTS
    return first + (7 * job + step + 3 * restarts) % count


def first_host(nodes: str) -> str:
    """First host of a Slurm list: `rack1-n[003-007,9],login` is `rack1-n003`.

    A range begins with its first number as it is written, so the list need not be expanded. Raises ValueError for an
    empty or unbalanced list.
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes.strip())
    if first is None or nodes.count("[") != nodes.count("]"):
        rule, fix = "must be a list such as n[1-4]", "set MASTER_ADDR, or use srun"
        raise invalid("SLURM_STEP_NODELIST", "syntax", nodes, rule, fix)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def first_address(nodes: str) -> str:
    """Name or address of the first host of a Slurm list. May run scontrol, 20 s at most. Raises as `first_host`."""
    host = first_host(nodes)
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError:  # node names need not be host names; Slurm has the address
        command = ["scontrol", "show", "node", host, "--oneliner"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):  # scontrol is absent, slow or fails
        return host
    found = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
    return found[1] if found else host

"""What a cluster is like: the file that says it once for all jobs, and the limits that Slurm tells of itself."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_resilience._shared.paths import user_path
from forge_resilience._shared.problems import Problem, invalid
from forge_resilience._shared.toml_files import read_toml
from forge_resilience.slurm.config import SlurmConfig, seconds_of

__all__ = [
    "find_site",
    "grace_warnings",
    "job_warnings",
    "limit_problem",
    "read_site",
    "site_path",
    "site_text",
]

_FOLDER = "~/.config/forge"
Environ = Mapping[str, str]


def find_site(name: str | None = None, environ: Environ = os.environ) -> Path | None:
    """The site file: `name`, else FORGE_SITE, else ~/.config/forge/site.toml if it exists, else None.

    A name without slash and ending, `hpc1`, means ~/.config/forge/hpc1.toml. Raises ValueError for one that is not there.
    """
    named = name or environ.get("FORGE_SITE")
    if not named:
        default = site_path("site")
        return default if default.exists() else None
    path = site_path(named)
    if not path.is_file():
        origin = "--site" if name else "FORGE_SITE"
        fix = f"write one: forge-train doctor --init --site {named}"
        raise invalid(origin, "not_found", named, f"is not a file at {path}", fix)
    return path


def site_path(name: str) -> Path:
    """Where the site of a name, or of a path, is kept."""
    short = "/" not in name and not name.endswith(".toml")
    return user_path(_FOLDER) / f"{name}.toml" if short else user_path(name)


def read_site(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The table [slurm] of a site file: keys of `SlurmConfig`. Raises ValueError for anything else in it."""
    try:
        table = read_toml(user_path(path))
    except ValueError as error:
        fix = f"write it again: forge-train doctor --init --site {path}"
        raise invalid("", "damaged", ..., str(error), fix, where=path) from error
    if table.keys() - {"slurm"} or not isinstance(table.get("slurm", {}), dict):
        raise invalid("", "tables", sorted(table), "must be one table, [slurm]", where=path)
    return dict(table.get("slurm", {}))


def job_warnings(config: SlurmConfig, save_limit_seconds: float) -> list[str]:
    """`grace_warnings`, and what a job asks for that names no GPU."""
    warnings = grace_warnings(save_limit_seconds, config.partition)
    if not config.gpus_per_node and not any("gpu" in option for option in config.sbatch_options):
        limit = config.time_limit or "that of the partition"
        warnings.append(
            f"the job asks for no GPU: nodes {config.nodes}, tasks on each {config.ranks_per_node}, time limit {limit}; set "
            "more in [slurm], or once for all jobs in a site file (forge-train doctor --init)"
        )
    return warnings


def grace_warnings(save_limit_seconds: float, partition: str | None = None) -> list[str]:
    """Sentences about kills that come before a save of that length ends. Empty without Slurm; cost: two queries."""
    warnings = []
    wait = re.search(r"^KillWait\s*=\s*(\d+)", _ask("scontrol", "show", "config"), re.MULTILINE)
    if wait and int(wait[1]) < save_limit_seconds:
        warnings.append(
            f"KillWait of this site is {wait[1]} s, below resilience.save_limit_seconds {save_limit_seconds:g}: scancel, "
            "scontrol requeue and a node that fails may kill ranks that have not saved yet; the signal before the time "
            "limit comes early enough"
        )
    for line in _partitions(partition):
        grace, mode = line.get("GraceTime", ""), line.get("PreemptMode", "OFF")
        if grace.isdecimal() and int(grace) < save_limit_seconds and mode not in ("OFF", "SUSPEND"):
            warnings.append(
                f"partition {line['PartitionName']} preempts jobs ({mode}) after a GraceTime of {grace} s, below "
                f"resilience.save_limit_seconds {save_limit_seconds:g}: a preempted job may lose the steps since its last "
                "checkpoint; save more often, or use a partition with more grace"
            )
    return warnings


def limit_problem(lead_seconds: int, partition: str | None = None) -> Problem | None:
    """Why a job without a time limit of its own cannot run here: the partition's leaves no time before the save."""
    for line in _partitions(partition):
        default, most = line.get("DefaultTime", "NONE"), line.get("MaxTime", "UNLIMITED")
        limit = most if default == "NONE" else default
        seconds = seconds_of(limit)
        if seconds is not None and seconds <= lead_seconds:
            rule = (
                f"must be set: partition {line['PartitionName']} gives a job without one {limit}, no longer than "
                f"the {lead_seconds} s before its end at which a job is told to save"
            )
            fix = "use a longer limit, or a lower resilience.save_limit_seconds"
            return Problem("time_limit", "missing", ..., rule, fix)
    return None


def site_text() -> str:
    """A site file from what Slurm says of its default partition and of this user. Raises RuntimeError without a Slurm."""
    partitions = _partitions(None, every=True)
    if not partitions:
        raise RuntimeError(
            "scontrol show partition lists none; run this where sbatch works, on a login node"
        )
    chosen = next((p for p in partitions if p.get("Default") == "YES"), partitions[0])
    name = chosen["PartitionName"]
    others = ", ".join(p["PartitionName"] for p in partitions if p is not chosen)
    lines = ["# What this cluster is like, for all jobs; [slurm] of a job wins. Keys: docs/configuration.md", "[slurm]",
             f'partition = "{name}"' + (f"  # others: {others}" if others else "")]  # fmt: skip
    lines += _account_lines()
    cpus, gpus, kind = _node_of(name)
    if gpus:
        gres = f"--gres=gpu:{kind}:{{gpus}}" if kind else "--gres=gpu:{gpus}"
        lines += [
            f"gpus_per_node = {gpus}",
            f'gpus_option = "{gres}"',
            f"cpus_per_task = {max(1, cpus // gpus)}",
        ]
    limit = chosen.get("MaxTime", "UNLIMITED")
    lines.append(
        f'time_limit = "{limit}"'
        if limit != "UNLIMITED"
        else '# time_limit = "1-00:00:00"  # no limit here'
    )
    grace, mode = chosen.get("GraceTime", "0"), chosen.get("PreemptMode", "OFF")
    if mode != "OFF":
        lines.append(f"# jobs are preempted ({mode}) {grace} s after they are told")
    lines += [
        '# prologue = ["module load cuda/12.8"]  # lines before the ranks start',
        '# srun_options = ["--cpu-bind=cores"]',
        '# container = ["apptainer", "exec", "--nv", "$SCRATCH/torch.sif"]',
        '# on_stop = "resubmit"  # where scontrol requeue is forbidden',
        "# [slurm.environment]",
        '# NCCL_SOCKET_IFNAME = "ib0"',
    ]
    return "\n".join(lines) + "\n"


def _account_lines() -> list[str]:
    user = os.environ.get("USER", "")
    found = _ask(
        "sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={user}", "format=account"
    ).split()
    accounts = list(dict.fromkeys(found))
    if len(accounts) == 1:
        return [f'account = "{accounts[0]}"']
    return [f'# account = "{accounts[0]}"  # one of {", ".join(accounts)}'] if accounts else []


def _node_of(partition: str) -> tuple[int, int, str]:
    """(cores, GPUs, their kind as gres says it) of the nodes of a partition, of which most GPUs count."""
    best = (0, 0, "")
    for line in _ask(
        "sinfo", "--noheader", f"--partition={partition}", "--format=%c|%G"
    ).splitlines():
        cpus, _, gres = line.partition("|")
        gpu = re.search(r"\bgpu(?::([A-Za-z][\w.-]*))?:(\d+)", gres)
        cores = re.match(r"\d+", cpus.strip())
        kind = gpu[1] if gpu and gpu[1] else ""
        here = (int(cores[0]) if cores else 1, int(gpu[2]) if gpu else 0, kind)
        best = max(best, here, key=lambda node: (node[1], node[0]))
    return best


def _partitions(name: str | None, every: bool = False) -> list[dict[str, str]]:
    """Fields of a partition; of the default one without a name."""
    text = _ask("scontrol", "--oneliner", "show", "partition", *([name] if name else []))
    found = [
        dict(re.findall(r"(\w+)=(\S*)", line))
        for line in text.splitlines()
        if "PartitionName=" in line
    ]
    return found if every or name else [p for p in found if p.get("Default") == "YES"]


def _ask(*command: str) -> str:
    """The output of a client command of Slurm; empty where it is absent, slow or fails."""
    try:
        done: Any = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return str(done.stdout)

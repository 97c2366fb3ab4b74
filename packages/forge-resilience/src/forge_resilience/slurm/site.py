"""The site file of a cluster, read for all jobs, and the limits that Slurm reports."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from forge_resilience._shared.paths import user_path
from forge_resilience._shared.problems import Problem, invalid
from forge_resilience._shared.toml_files import read_toml
from forge_resilience.health.probes import BROKEN, MISSING, OK, Finding
from forge_resilience.slurm.client import answer, call
from forge_resilience.slurm.config import SlurmConfig, seconds_of

_FOLDER = "~/.config/forge"
# A line for each argument: the node, and a checksum, so that nodes can be compared, of the names in a folder or of the
# first MiB of a file, as a large one takes long to read.
_LOOK = """
for path; do
  if [ -d "$path" ]; then seen=$(ls -A -- "$path" | cksum)
  else seen=$(stat --dereference --format=%s -- "$path" && head -c 1048576 -- "$path" | cksum) || seen=missing; fi
  echo "${SLURMD_NODENAME:-here}|$(echo $seen)"
done 2>/dev/null
"""


def find_site(name: str | None = None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Find the site file: `name`, else FORGE_SITE, else ~/.config/forge/site.toml if it exists, else None.

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
    """Return the path of the site file with a name or path."""
    short = "/" not in name and not name.endswith(".toml")
    return user_path(_FOLDER) / f"{name}.toml" if short else user_path(name)


def read_site(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the table [slurm] of a site file: keys of `SlurmConfig`. Raises ValueError for anything else in it."""
    try:
        table = read_toml(user_path(path))
    except ValueError as error:
        fix = f"write it again: forge-train doctor --init --site {path}"
        raise invalid("", "damaged", ..., str(error), fix, where=path) from error
    if table.keys() - {"slurm"} or not isinstance(table.get("slurm", {}), dict):
        raise invalid("", "tables", sorted(table), "must be one table, [slurm]", where=path)
    return dict(table.get("slurm", {}))


def job_warnings(config: SlurmConfig, save_limit_seconds: float) -> list[str]:
    """Return `grace_warnings`, and a warning for a job that asks for no GPU."""
    warnings = grace_warnings(save_limit_seconds, config.partition)
    if not config.gpus_per_node and not any("gpu" in option for option in config.sbatch_options):
        limit = config.time_limit or "that of the partition"
        asked = f"nodes {config.nodes}, tasks on each {config.ranks_per_node}, time limit {limit}"
        fix = "set more in [slurm], or once for all jobs in a site file (forge-train doctor --init)"
        warnings.append(f"the job asks for no GPU: {asked}; {fix}")
    return warnings


def grace_warnings(save_limit_seconds: float, partition: str | None = None) -> list[str]:
    """Return warnings of kills that come before a save of that length ends. Empty without Slurm; cost: two queries."""
    warnings, limit = [], f"below resilience.save_limit_seconds {save_limit_seconds:g}"
    wait = re.search(r"^KillWait\s*=\s*(\d+)", answer("scontrol", "show", "config"), re.MULTILINE)
    if wait and int(wait[1]) < save_limit_seconds:
        warnings.append(
            f"KillWait of this site is {wait[1]} s, {limit}: scancel, scontrol requeue and a node that fails may kill "
            "ranks that have not saved yet; the signal before the time limit comes early enough"
        )

    for line in _partitions(partition):
        grace, mode = line.get("GraceTime", ""), line.get("PreemptMode", "OFF")
        if grace.isdecimal() and int(grace) < save_limit_seconds and mode not in ("OFF", "SUSPEND"):
            what = f"partition {line['PartitionName']} preempts jobs ({mode}) after a GraceTime of {grace} s"
            loss = "a preempted job may lose the steps since its last checkpoint"
            fix = "save more often, or use a partition with more grace"
            warnings.append(f"{what}, {limit}: {loss}; {fix}")
    return warnings


def limit_problem(lead_seconds: int, partition: str | None = None) -> Problem | None:
    """Return a problem if the partition's time limit leaves a job without one no time to save."""
    for line in _partitions(partition):
        default, most = line.get("DefaultTime", "NONE"), line.get("MaxTime", "UNLIMITED")
        limit = most if default == "NONE" else default
        seconds = seconds_of(limit)
        if seconds is not None and seconds <= lead_seconds:
            rule = (
                f"must be set: partition {line['PartitionName']} gives a job without one {limit}, no longer than "
                f"the {lead_seconds} s before its end at which a job is asked to save"
            )
            fix = "use a longer limit, or a lower resilience.save_limit_seconds"
            return Problem("time_limit", "missing", ..., rule, fix)
    return None


def site_text() -> str:
    """Make the text of a site file from Slurm's default partition and this user's accounts. Raises RuntimeError without a Slurm."""
    partitions = _partitions(None, every=True)
    if not partitions:
        fix = "run this where sbatch works, on a login node"
        raise RuntimeError(f"scontrol show partition lists none; {fix}")
    chosen = next((p for p in partitions if p.get("Default") == "YES"), partitions[0])

    name = chosen["PartitionName"]
    others = ", ".join(p["PartitionName"] for p in partitions if p is not chosen)
    lines = ["# What this cluster is like, for all jobs; [slurm] of a job wins. Keys: docs/configuration.md", "[slurm]",
             f'partition = "{name}"' + (f"  # others: {others}" if others else "")]  # fmt: skip
    lines += _account_lines()

    cpus, gpus, kind = _node_of(name)
    if gpus:
        gres = f"--gres=gpu:{kind}:{{gpus}}" if kind else "--gres=gpu:{gpus}"
        lines += [f"gpus_per_node = {gpus}", f'gpus_option = "{gres}"']
        lines.append(f"cpus_per_task = {max(1, cpus // gpus)}")

    limit, none = chosen.get("MaxTime", "UNLIMITED"), '# time_limit = "1-00:00:00"  # no limit here'
    lines.append(none if limit == "UNLIMITED" else f'time_limit = "{limit}"')
    grace, mode = chosen.get("GraceTime", "0"), chosen.get("PreemptMode", "OFF")
    if mode != "OFF":
        lines.append(f"# jobs are preempted ({mode}) {grace} s after their signal")

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
    """The line of the site file for this user's account."""
    user = os.environ.get("USER", "")
    command = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc")
    found = answer(*command, f"user={user}", "format=account").split()
    accounts = list(dict.fromkeys(found))
    if len(accounts) == 1:
        return [f'account = "{accounts[0]}"']
    return [f'# account = "{accounts[0]}"  # one of {", ".join(accounts)}'] if accounts else []


def _node_of(partition: str) -> tuple[int, int, str]:
    """(cores, GPUs, kind of GPU in gres) of the node of a partition with most GPUs."""
    found = [(0, 0, "")]
    shown = answer("sinfo", "--noheader", f"--partition={partition}", "--format=%c|%G")
    for line in shown.splitlines():
        cpus, _, gres = line.partition("|")
        gpu = re.search(r"\bgpu(?::([A-Za-z][\w.-]*))?:(\d+)", gres)
        cores = re.match(r"\d+", cpus.strip())
        kind = gpu[1] if gpu and gpu[1] else ""
        found.append((int(cores[0]) if cores else 1, int(gpu[2]) if gpu else 0, kind))
    return max(found, key=lambda node: (node[1], node[0]))


def _partitions(name: str | None, every: bool = False) -> list[dict[str, str]]:
    """Fields of a partition, by default of the default partition."""
    text = answer("scontrol", "--oneliner", "show", "partition", *([name] if name else []))
    lines = [line for line in text.splitlines() if "PartitionName=" in line]
    found = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
    return found if every or name else [p for p in found if p.get("Default") == "YES"]


# ---- the controller, and files on nodes


class NoNodes(RuntimeError):
    """The nodes could not be asked: too few, busy, or Slurm rejects the job."""


def controller() -> Finding:
    """Check that there is a Slurm and its controller answers."""
    programs = ("sbatch", "srun", "scontrol", "squeue")
    if missing := [name for name in programs if shutil.which(name) is None]:
        fix = "run this on a login node of the cluster"
        return Finding("slurm", MISSING, f"no {', '.join(missing)}", fix=fix)

    fix = "ask who runs the cluster: its controller does not answer"
    try:
        done = call("scontrol", "ping")
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("slurm", BROKEN, str(error), fix=fix)
    line = ((done.stdout or done.stderr).strip() or "no answer").splitlines()[0]
    if done.returncode == 0 and " UP" in done.stdout:
        return Finding("slurm", OK, line)
    return Finding("slurm", BROKEN, line, fix=fix)


def shared_files(
    paths: Sequence[str], written: Sequence[str], config: SlurmConfig, wait_seconds: int = 60
) -> Finding:
    """Check that two nodes see files and folders as this machine does: `unseen_files` as a finding."""
    what = "multi-node"
    try:
        unseen = unseen_files(paths, config, written=written, wait_seconds=wait_seconds)
    except NoNodes as error:
        fix = "try again when nodes are free, or with another --site"
        return Finding(what, MISSING, str(error), fix=fix)
    except OSError as error:
        return Finding(what, BROKEN, str(error), fix="fix that path")
    lost = [f"{node} does not see {path}" for node, missing in unseen.items() for path in missing]
    if lost:
        return Finding(what, BROKEN, "; ".join(lost), fix="put it on the shared file system")
    return Finding(what, OK, f"{', '.join(unseen)} see {', '.join([*paths, *written])}")


def unseen_files(
    paths: Sequence[str],
    config: SlurmConfig,
    *,
    written: Sequence[str] = (),
    nodes: int = 2,
    wait_seconds: int = 60,
) -> dict[str, list[str]]:
    """Return node -> the `paths` and `written` that it does not see as this machine does; one srun asks `nodes` nodes.

    Files are compared by size and first MiB, folders by the names in them, and the folders `written` by a file that is
    written there for the moment. Partition, account, qos and further options are those of `config`; inside a job its own
    nodes are asked. Cost: one job of some seconds. Raises NoNodes when they do not answer within `wait_seconds`,
    OSError for a path that is not here or not writable.
    """
    with ExitStack() as probes:
        for path in paths:
            os.stat(path)
        files = [*paths, *(probes.enter_context(_temporary_file(folder)) for folder in written)]
        look = ["env", "LC_ALL=C", "sh", "-c", _LOOK, "sh", *files]
        own = subprocess.run(look, capture_output=True, text=True, check=True).stdout
        seen = _checksums_by_node(_run_on_nodes(look, config, nodes, wait_seconds))

    if len(seen) < nodes or any(len(sums) != len(files) for sums in seen.values()):
        fix = "look at sinfo, or ask for a partition with more nodes"
        raise NoNodes(f"{len(seen)} of {nodes} nodes answered; {fix}")
    (mine,), names = _checksums_by_node(own).values(), (*paths, *written)
    return {
        node: [path for path, a, b in zip(names, mine, sums) if a != b]
        for node, sums in sorted(seen.items())
    }


@contextmanager
def _temporary_file(folder: str) -> Iterator[str]:
    """A file of random content in the folder, as long as the context is open."""
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".forge-seen-") as file:
        file.write(secrets.token_hex(16))
        file.flush()
        os.fsync(file.fileno())
        yield file.name


def _run_on_nodes(
    command: Sequence[str], config: SlurmConfig, nodes: int, wait_seconds: int
) -> str:
    """Run a command on `nodes` nodes, of this job or of a new one, and return its output."""
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    srun += ["--quiet", "--chdir=/"]
    inside = "SLURM_JOB_ID" in os.environ
    if inside:
        srun.append("--overlap")
    else:
        srun += [f"--immediate={wait_seconds}", "--time=2", "--job-name=forge-doctor"]
        asked = (("partition", config.partition), ("account", config.account), ("qos", config.qos))
        srun += [f"--{name}={value}" for name, value in asked if value]
        srun += config.sbatch_options

    environ = dict(os.environ) if inside else None
    try:
        done = call(*srun, *command, environ=environ, timeout=wait_seconds + 120)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoNodes(f"srun did not run: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise NoNodes(f"no {nodes} nodes within {wait_seconds} s: {last}")
    return done.stdout


def _checksums_by_node(output: str) -> dict[str, list[str]]:
    """Node -> checksums of files, from the output of `_LOOK`."""
    seen: dict[str, list[str]] = {}
    for line in output.splitlines():
        node, bar, found = line.partition("|")
        if bar:
            seen.setdefault(node, []).append(found)
    return seen

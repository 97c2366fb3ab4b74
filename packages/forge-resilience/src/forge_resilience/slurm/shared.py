"""Whether the controller of a cluster answers, and whether its nodes see the files of this machine: by looking, from them."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from forge_resilience.health.finding import BROKEN, MISSING, OK, Finding
from forge_resilience.slurm.config import SlurmConfig
from forge_resilience.slurm.queue import clean_environ

__all__ = ["NoNodes", "controller", "shared_files", "unseen_files"]

# A line for each argument: the node, and a checksum of how a file begins, or of the names in a folder.
_LOOK = """
for path; do
  if [ -d "$path" ]; then seen=$(ls -A -- "$path" | cksum)
  else seen=$(stat --dereference --format=%s -- "$path" && head -c 1048576 -- "$path" | cksum) || seen=missing; fi
  echo "${SLURMD_NODENAME:-here}|$(echo $seen)"
done 2>/dev/null
"""


class NoNodes(RuntimeError):
    """The nodes could not be asked: too few, busy, or Slurm refuses."""


def controller() -> Finding:
    """Whether there is a Slurm whose controller answers."""
    programs = ("sbatch", "srun", "scontrol", "squeue")
    if missing := [name for name in programs if shutil.which(name) is None]:
        fix = "run this on a login node of the cluster"
        return Finding("slurm", MISSING, f"no {', '.join(missing)}", fix=fix)
    done = subprocess.run(["scontrol", "ping"], capture_output=True, text=True)
    answer = ((done.stdout or done.stderr).strip() or "no answer").splitlines()[0]
    if done.returncode == 0 and " UP" in done.stdout:
        return Finding("slurm", OK, answer)
    fix = "ask who runs the cluster: its controller does not answer"
    return Finding("slurm", BROKEN, answer, fix=fix)


def shared_files(
    paths: Sequence[str], written: Sequence[str], config: SlurmConfig, wait_seconds: int = 60
) -> Finding:
    """Whether two nodes see files and folders as this machine does: `unseen_files`, in words."""
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
    """node -> those of `paths` and `written` that it does not see as this machine does; one srun asks `nodes` nodes.

    Files are compared by size and first MiB, folders by the names in them, and the folders `written` by a file that is
    written there for the moment. Partition, account, qos and further options are those of `config`; inside a job its own
    nodes are asked. Cost: one job of some seconds. Raises NoNodes when they do not answer within `wait_seconds`,
    OSError for a path that is not here or not writable.
    """
    with ExitStack() as probes:
        for path in paths:
            os.stat(path)
        files = [*paths, *(probes.enter_context(_probe(folder)) for folder in written)]
        here = _sums(
            subprocess.run(_looking(files), capture_output=True, text=True, check=True).stdout
        )
        seen = _sums(_on_nodes(_looking(files), config, nodes, wait_seconds))
    if len(seen) < nodes or any(len(sums) != len(files) for sums in seen.values()):
        raise NoNodes(
            f"{len(seen)} of {nodes} nodes answered; look at sinfo, or ask for a partition with more nodes"
        )
    (mine,) = here.values()
    return {
        node: [path for path, a, b in zip((*paths, *written), mine, sums) if a != b]
        for node, sums in sorted(seen.items())
    }


@contextmanager
def _probe(folder: str) -> Iterator[str]:
    """A file of random content in the folder, as long as the context is open."""
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".forge-seen-") as file:
        file.write(secrets.token_hex(16))
        file.flush()
        os.fsync(file.fileno())
        yield file.name


def _looking(files: Sequence[str]) -> list[str]:
    return ["env", "LC_ALL=C", "sh", "-c", _LOOK, "sh", *files]


def _on_nodes(command: Sequence[str], config: SlurmConfig, nodes: int, wait_seconds: int) -> str:
    inside = "SLURM_JOB_ID" in os.environ
    srun = [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--quiet",
        "--chdir=/",
    ]
    if inside:
        srun.append("--overlap")
    else:
        srun += [f"--immediate={wait_seconds}", "--time=2", "--job-name=forge-doctor"]
        asked = (("partition", config.partition), ("account", config.account), ("qos", config.qos))
        srun += [f"--{name}={value}" for name, value in asked if value]
        srun += config.sbatch_options
    try:
        done = subprocess.run(
            [*srun, *command], capture_output=True, text=True, timeout=wait_seconds + 120,
            env=dict(os.environ) if inside else clean_environ(), stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise NoNodes(f"srun did not run: {error}") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise NoNodes(f"no {nodes} nodes within {wait_seconds} s: {said}")
    return done.stdout


def _sums(output: str) -> dict[str, list[str]]:
    seen: dict[str, list[str]] = {}
    for line in output.splitlines():
        node, bar, found = line.partition("|")
        if bar:
            seen.setdefault(node, []).append(found)
    return seen

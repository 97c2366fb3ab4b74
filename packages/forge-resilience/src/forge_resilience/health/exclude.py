"""Keep a failing node out of the next life of a Slurm job.

    nodes=$(python -m forge_resilience.health runs/a) || exit 71

prints the nodes that events of the last life name as broken, separated by commas; exit code 1 if there are none.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from forge_resilience._shared.paths import user_path
from forge_resilience._shared.problems import invalid
from forge_resilience.journal import read_events

__all__ = ["broken_nodes", "exclude_nodes"]

_LIFE = ("start", "resume")
_SECONDS = 60.0


def broken_nodes(journal: str | os.PathLike[str]) -> list[str]:
    """The nodes that the last life of a run found broken, by its events `health` and `mismatch`.

    Of two copies that differ nobody knows which is wrong, so their nodes are not among them.
    """
    nodes: dict[str, None] = {}
    for event in read_events(journal):
        if event.get("event") in _LIFE:
            nodes.clear()
        elif event.get("event") in ("health", "mismatch") and event.get("is_known"):
            nodes.update(dict.fromkeys(event.get("nodes") or ()))
    return list(nodes)


def exclude_nodes(
    nodes: Sequence[str], job: str | None = None, environ: Mapping[str, str] | None = None
) -> None:
    """Requeue a Slurm job without `nodes`; by default the job that this process belongs to.

    `scontrol requeue`, then the nodes join the ExcNodeList of the pending job: Slurm starts a requeued job only when its
    old credential has expired (120 s by default), so there is time, and a caller that is killed in between leaves a job
    that starts anywhere (`requeuehold` would leave one that never starts). Slurm ends the processes of the job with
    TERM at once: the caller ignores it (`trap '' TERM`).

    Raises RuntimeError with Slurm's words if it refuses, ValueError for names that are none.
    """
    for node in nodes:
        if not re.fullmatch(r"[\w.-]+", node):
            raise invalid("nodes", "name", node, "must name a node", "use one that sinfo lists")
    environ = os.environ if environ is None else environ
    job = job or environ.get("SLURM_JOB_ID")
    if not nodes:
        raise invalid("nodes", "missing", list(nodes), "must be given")
    if not job:
        raise invalid("job", "missing", job, "must be given outside a job")

    _scontrol(["requeue", job], environ)
    shown = _scontrol(["--oneliner", "show", "job", job], environ)
    (before,) = re.findall(r" ExcNodeList=(\S+)", shown)[:1] or ["(null)"]
    names = ",".join(([] if before == "(null)" else [before]) + list(nodes))
    _scontrol(["update", f"JobId={job}", f"ExcNodeList={names}"], environ)


def _scontrol(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    done = subprocess.run(
        ["scontrol", *arguments], env=dict(environ), capture_output=True, text=True, timeout=_SECONDS
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(
            f"scontrol {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}"
        )
    return done.stdout


def main(arguments: Sequence[str]) -> int:
    """Print the broken nodes of a run's folder, or of a journal; 1 if it names none, 2 for wrong arguments."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    path = user_path(arguments[0])
    nodes = broken_nodes(path / "events.jsonl" if path.is_dir() else path)
    if nodes:
        print(",".join(nodes))
    return 0 if nodes else 1

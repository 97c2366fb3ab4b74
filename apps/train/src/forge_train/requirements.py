"""What a cluster must have for a job, found by trying; and the file that describes the cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import forge_resilience
import forge_train
from forge_resilience import ExitCode
from forge_resilience.health import BROKEN, OK, Finding
from forge_resilience.slurm import NoNodes, SlurmConfig, site_path, site_text, unseen_files
from forge_train._shared.problems import Problem, invalid
from forge_train.config.layers import Layers, read_layers
from forge_train.config.resolve import ResolvedJob, resolve
from forge_train.config.structure import structure
from forge_train.doctor import MISSING
from forge_train.errors import ConfigError, JobError, refuse
from forge_train.slurm import add_site

_KNOWN = ("slurm", "multi-node", "gpu")


def write_site(name: str | None) -> int:
    """Write the site file `name` from what Slurm says; ConfigError if it exists already, JobError without a Slurm."""
    path = site_path(name or os.environ.get("FORGE_SITE") or "site")
    if path.exists():
        fix = "edit it, or remove it to have it written anew"
        raise invalid("--site", "exists", str(path), "exists already", fix, kind=ConfigError)
    try:
        text = site_text()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except (RuntimeError, OSError) as error:
        raise JobError([f"{path} was not written: {error}"]) from error
    print(f"{text}\nwrote {path}; look it over: every job of forge-train slurm starts from it")
    return ExitCode.DONE


def required_findings(names: str | None, config: str | None, site: str | None) -> Iterator[Finding]:
    """A finding for each of `names`, separated by commas; the paths of the job `config` are looked at, too.

    ConfigError for an unknown name, and for a job that could not run anyway. Cost of multi-node: a job of two nodes.
    """
    wanted = [name.strip() for name in (names or "").split(",") if name.strip()]
    unknown = [name for name in wanted if name not in _KNOWN]
    rule = f"must be some of {', '.join(_KNOWN)}"
    refuse([Problem("--requires", "unknown", name, rule) for name in unknown])
    if config is not None and "multi-node" not in wanted:
        rule, fix = "is read from other nodes", "add --requires multi-node"
        raise invalid("config", "requires", str(config), rule, fix, kind=ConfigError)
    layers = Layers() if config is None else read_layers(config)
    add_site(layers, site)
    job = None if config is None else resolve(layers)
    return _look(wanted, job, _slurm_of(layers))


def _slurm_of(layers: Layers) -> SlurmConfig:
    built, problems = structure({"slurm": layers.values.get("slurm", {})})
    refuse([problem for problem in problems if problem.key.startswith("slurm.")])
    return built["slurm"]


def _look(wanted: list[str], job: ResolvedJob | None, slurm: SlurmConfig) -> Iterator[Finding]:
    if "gpu" in wanted:
        yield _gpu()
    controller = _controller() if {"slurm", "multi-node"} & set(wanted) else None
    if controller is not None:
        yield controller
    if "multi-node" in wanted and controller is not None and controller.state == OK:
        yield _shared(job, slurm)


def _gpu() -> Finding:
    """Whether there is one; what it computes is among the other findings."""
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if count:
        return Finding("gpu", OK, f"{count} here")
    return Finding(
        "gpu", MISSING, "none here", fix="run this on a node with one: srun ... forge-train doctor"
    )


def _controller() -> Finding:
    missing = [
        name for name in ("sbatch", "srun", "scontrol", "squeue") if shutil.which(name) is None
    ]
    if missing:
        return Finding(
            "slurm",
            MISSING,
            f"no {', '.join(missing)}",
            fix="run this on a login node of the cluster",
        )
    done = subprocess.run(["scontrol", "ping"], capture_output=True, text=True)
    answer = (done.stdout or done.stderr).strip()
    good = done.returncode == 0 and " UP" in answer
    return Finding("slurm", OK if good else BROKEN, answer.splitlines()[0] if answer else "no answer",
                   fix="" if good else "ask who runs the cluster: its controller does not answer")  # fmt: skip


def _paths(job: ResolvedJob | None) -> tuple[list[str], list[str]]:
    """(code and data, which are read; folders that are written: the run directory of a job, or its first parent)."""
    read = [sys.executable, str(forge_train.__file__), str(forge_resilience.__file__), os.getcwd()]
    if job is None:
        return read, []
    data, evaluation = job.config.data, job.config.eval
    sources = [*data.sources.values(), data.validation, *evaluation.sets.values()]
    read += [os.path.abspath(c.path) for c in evaluation.choices.values() if c.path]
    read += [
        os.path.abspath(source.path)
        for source in sources
        if source is not None and source.path
        # a name of the hub is no path
        if source.name != "huggingface" or os.path.exists(source.path)
    ]
    run_dir = Path(job.config.run.dir).absolute()
    written = next(folder for folder in (run_dir, *run_dir.parents) if folder.is_dir())
    return list(dict.fromkeys(read)), [str(written)]


def _shared(job: ResolvedJob | None, slurm: SlurmConfig) -> Finding:
    read, written = _paths(job)
    try:
        unseen = unseen_files(read, slurm, written=written)
    except NoNodes as error:
        return Finding(
            "multi-node",
            MISSING,
            str(error),
            fix="try again when nodes are free, or with another --site",
        )
    except OSError as error:
        return Finding("multi-node", BROKEN, str(error), fix="fix that path")
    lost = [f"{node} does not see {path}" for node, missing in unseen.items() for path in missing]
    if lost:
        return Finding(
            "multi-node", BROKEN, "; ".join(lost), fix="put it on the shared file system"
        )
    return Finding("multi-node", OK, f"{', '.join(unseen)} see {', '.join([*read, *written])}")

"""`forge-train doctor`: abilities of this machine and what a job needs of a cluster, found by trying; no probe assumes a GPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import forge_resilience
import forge_train
from forge_data import SourceConfig, open_source
from forge_resilience import ExitCode, slurm
from forge_resilience.health import (
    BROKEN,
    MISSING,
    OK,
    WARN,
    Finding,
    accelerator_count,
    machine_findings,
    optional,
    probe,
)
from forge_train._shared.problems import Problem, invalid
from forge_train.build.resolve import ResolvedJob, resolve
from forge_train.config.layers import Layers, read_layers
from forge_train.config.structure import structure
from forge_train.errors import ConfigError, job_errors, refuse
from forge_train.slurm import add_site

_CODES = {OK: (0, "green"), WARN: (1, "yellow"), MISSING: (1, "yellow"), BROKEN: (2, "red")}
_OPTIONAL = {
    "tensorboard": ("TensorBoard files", "pip install 'forge-train[track]'"),
    "plotly": ("pages of forge-train report", "pip install 'forge-lab[report]'"),
    "tokenizers": ("tokenizer JSON files", "pip install 'forge-train[tokenizers]'"),
}
_NAMES = ("core", "parallel", "moe", "data", "ckpt", "resilience", "vlm")
_PACKAGES = {f"forge_{name}": f"forge-{name}" for name in _NAMES} | {"forge_core": "forge-train-core"}  # fmt: skip
_REINSTALL = "reinstall forge-train"
_KNOWN = ("slurm", "multi-node", "gpu")


def examine(as_json: bool = False, required: Iterable[Finding] = ()) -> int:
    """Print the findings, and those that were `required`; 0 when all is well, 1 when something is missing or amiss, of
    the required ones where there are some, and 2 when runs cannot work."""
    required = [*required]
    findings = [*_findings(), *required]
    code = max(
        _CODES[f.state][0] for f in findings if f.state == BROKEN or not required or f in required
    )
    if as_json:
        rows = [{key: getattr(f, key) for key in ("what", "state", "detail", "fix")} for f in findings]  # fmt: skip
        print(json.dumps({"ready": code == 0, "exit_code": code, "findings": rows}))
        return code

    table = Table("what", "state", "detail", "what to do")
    for f in findings:
        state = f"[{_CODES[f.state][1]}]{f.state}[/]"
        table.add_row(f.what, state, escape(f.detail), escape(f.fix))
    console = Console()
    console = console if console.is_terminal else Console(width=1000)  # whole commands in files
    console.print(table)
    console.print(("ready", "ready; something is missing or amiss", "not ready")[code])
    return code


def _findings() -> Iterator[Finding]:
    yield from machine_findings(_PACKAGES, _REINSTALL)
    yield probe("built-in text", _corpus, _REINSTALL)
    yield from (optional(module, *words) for module, words in _OPTIONAL.items())


def _corpus() -> Finding:
    return Finding("built-in text", OK, f"{open_source(SourceConfig()).num_tokens} tokens")


def write_site(name: str | None) -> int:
    """Write the site file `name` from what Slurm says; ConfigError if it exists already, JobError without a Slurm."""
    path = slurm.site_path(name or os.environ.get("FORGE_SITE") or "site")
    if path.exists():
        fix = "edit it, or remove it to have it written anew"
        raise invalid("--site", "exists", str(path), "exists already", fix, kind=ConfigError)
    with job_errors(f"{path} was not written: "):
        text = slurm.site_text()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {path}; look it over: every job of forge-train slurm starts from it")
    return ExitCode.DONE


def required_findings(names: str | None, config: str | None, site: str | None) -> Iterator[Finding]:
    """A finding for each of `names`, separated by commas; the paths of the job `config` are looked at, too.

    ConfigError for an unknown name, and for a job that could not run anyway. Cost of multi-node: a job of two nodes.
    """
    wanted = [name.strip() for name in (names or "").split(",") if name.strip()]
    rule = f"must be some of {', '.join(_KNOWN)}"
    refuse(Problem("--requires", "unknown", name, rule) for name in wanted if name not in _KNOWN)
    if config is not None and "multi-node" not in wanted:
        rule, fix = "is read from other nodes", "add --requires multi-node"
        raise invalid("config", "requires", config, rule, fix, kind=ConfigError)
    layers = Layers() if config is None else read_layers(config)
    add_site(layers, site)
    job = None if config is None else resolve(layers)
    built, problems = structure({"slurm": layers.values.get("slurm", {})})
    refuse(problem for problem in problems if problem.key.startswith("slurm."))
    return _look(wanted, job, built["slurm"])


def _look(
    wanted: list[str], job: ResolvedJob | None, config: slurm.SlurmConfig
) -> Iterator[Finding]:
    if "gpu" in wanted:
        yield accelerator_count()
    if {"slurm", "multi-node"} & set(wanted):
        yield (found := slurm.controller())
        if "multi-node" in wanted and found.state == OK:
            yield slurm.shared_files(*_paths(job), config)


def _paths(job: ResolvedJob | None) -> tuple[list[str], list[str]]:
    """(code and data, which are read; folders that are written: the run directory of a job, or its first parent)."""
    read = [sys.executable, str(forge_train.__file__), str(forge_resilience.__file__), os.getcwd()]
    if job is None:
        return read, []
    data, evaluation = job.config.data, job.config.eval
    sources = [*data.sources.values(), data.validation, *evaluation.sets.values()]
    paths = [choice.path for choice in evaluation.choices.values()]
    found = [(s.path, s.name == "huggingface") for s in sources if s is not None and s.path]
    # a name of the hub is not a path
    paths += [path for path, from_hub in found if not from_hub or os.path.exists(path)]
    read += [os.path.abspath(path) for path in paths if path]
    run_dir = Path(job.config.run.dir).absolute()
    written = next(folder for folder in (run_dir, *run_dir.parents) if folder.is_dir())
    return list(dict.fromkeys(read)), [str(written)]

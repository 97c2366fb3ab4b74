"""The site file, and what `doctor` finds out about a cluster by trying."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forge_resilience.slurm import (
    SlurmConfig,
    find_site,
    grace_warnings,
    limit_problem,
    read_site,
    site,
)
from forge_testing import forge_train, write_job
from forge_train.doctor import required_findings

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def doctor(
    slurm: Any, *arguments: str | Path, home: Path, **environ: str
) -> tuple[int, dict[str, dict[str, str]]]:
    """(exit code, findings by what they are about)."""
    done = forge_train(
        "doctor", "--json", *arguments, **{**slurm.environ, "HOME": str(home), **environ}
    )
    report = json.loads(done.out)
    assert report["exit_code"] == done.code, done.err
    return done.code, {finding["what"]: finding for finding in report["findings"]}


def test_the_site_that_doctor_writes_is_below_every_job(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    environ = {**slurm.environ, "HOME": str(tmp_path)}
    written = forge_train("doctor", "--init", **environ)
    assert written.code == 0, written.err
    path = tmp_path / ".config/forge/site.toml"
    assert find_site(environ={}) == path
    assert SlurmConfig(**read_site(path)) == SlurmConfig(partition="low", time_limit="01:00:00")
    before = path.read_bytes()
    again = forge_train("doctor", "--init", **environ)
    assert (again.code, str(path) in again.err) == (78, True)
    assert path.read_bytes() == before
    path.write_text(
        '[slurm]\npartition = "cpu"\ntime_limit = 30\nprologue = ["echo hello"]\n[slurm.environment]\nA = "site"\n'
    )
    job = write_job(tmp_path, '[slurm]\ntime_limit = 20\n[slurm.environment]\nB = "job"\n')
    shown = forge_train("slurm", job, "--dry_run", **environ)
    assert shown.code == 0, shown.err
    for line in (
        "--partition=cpu",
        "--time=20",
        "\necho hello\n",
        'export A="site"',
        'export B="job"',
    ):
        assert line in shown.out
    (tmp_path / "other.toml").write_text('[slurm]\npartition = "high"\n')
    other = forge_train(
        "slurm", job, "--dry_run", FORGE_SITE=str(tmp_path / "other.toml"), **environ
    )
    assert "--partition=high" in other.out
    named = forge_train("slurm", job, "--dry_run", "--site", "nowhere", **environ)
    assert (named.code, "--site 'nowhere'" in named.err) == (78, True)
    (tmp_path / "other.toml").write_text('[slurm]\npartitoin = "high"\n')
    wrong = forge_train("slurm", job, "--dry_run", "--site", tmp_path / "other.toml", **environ)
    assert (wrong.code, "slurm.partition?" in wrong.err) == (78, True)


def test_grace_below_the_save_limit_is_a_warning(slurm, monkeypatch):
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    kill_wait, grace = grace_warnings(60)
    assert re.search(r"^KillWait .* 10 s\b.* resilience\.save_limit_seconds 60\b", kill_wait)
    assert re.search(r"\blow\b.*\(REQUEUE\).* GraceTime .* 30 s\b", grace)
    assert len(grace_warnings(60, "high")) == 1, "nobody preempts there"
    assert len(grace_warnings(25, "low")) == 1
    assert grace_warnings(5) == []
    problem = limit_problem(300)
    assert (problem.key, problem.code) == ("time_limit", "missing")
    assert re.search(r"\blow\b.* 00:05:00\b", problem.rule)
    assert limit_problem(299, "cpu") is None


def test_files_that_another_node_does_not_see_are_named(slurm, tmp_path):
    shared = tmp_path / "shared folder"
    shared.mkdir()
    job = write_job(shared)
    code, found = doctor(slurm, job, "--requires", "slurm,multi-node", home=tmp_path)
    assert (code, found["slurm"]["state"], found["multi-node"]["state"]) == (0, "ok", "ok"), found
    assert str(shared) in found["multi-node"]["detail"]
    assert list(shared.iterdir()) == [job], "nothing is left"
    slurm.drain("n3", "n4")
    with slurm.hidden("n2", shared):
        code, found = doctor(slurm, job, "--requires", "multi-node", home=tmp_path)
    assert (code, found["multi-node"]["state"]) == (2, "broken")
    assert re.fullmatch(rf"n2 .* {re.escape(str(shared))}", found["multi-node"]["detail"])


def test_a_partition_with_too_few_nodes_is_named(slurm, tmp_path, monkeypatch):
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    soon = partial(site.shared_files, wait_seconds=2)  # a minute for people
    monkeypatch.setattr("forge_resilience.slurm.shared_files", soon)
    (tmp_path / "cpu.toml").write_text('[slurm]\npartition = "cpu"\n')
    found = required_findings("multi-node", None, str(tmp_path / "cpu.toml"))
    _, nodes = found
    assert nodes.state == "missing"
    assert nodes.detail.startswith("no 2 nodes within 2 s"), nodes
    assert "--site" in nodes.fix

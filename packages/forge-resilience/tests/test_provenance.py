"""What describes how a run was made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forge_resilience.journal import read_events, read_json_lines
from forge_resilience.provenance import (
    describe_environment,
    git_state,
    record_environment,
    recorded_hosts,
)

pytestmark = pytest.mark.lane("test")


def test_the_environment_is_json_and_a_missing_distribution_has_no_version() -> None:
    found = json.loads(json.dumps(describe_environment(["torch", "no-such-distribution"])))
    assert found["versions"]["no-such-distribution"] is None
    assert found["versions"]["torch"]
    assert found["command"] == sys.argv


def test_the_state_of_a_checkout_is_its_commit_and_its_diff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert git_state() == {}
    file = tmp_path / "a.txt"
    file.write_text("one\n")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for args in (("init", "-q"), ("add", "a.txt"), (*who, "commit", "-qm", "first")):
        subprocess.run(["git", *args], check=True)
    clean = git_state()
    assert len(clean["commit"]) == 40
    assert (clean["dirty"], clean["patch"]) == (False, "")
    file.write_text("two\n")
    changed = git_state()
    assert changed["dirty"]
    assert "+two" in changed["patch"]

    run = tmp_path / "run"
    run.mkdir()
    assert recorded_hosts(run) is None
    record_environment(run, ["torch"], ["a", "b"])
    assert recorded_hosts(run) == ["a", "b"]
    assert (run / "git.patch").read_text() == changed["patch"]
    recorded = json.loads((run / "environment.json").read_text())
    assert recorded["git"] == {"commit": clean["commit"], "dirty": True}
    file.write_text("one\n")
    record_environment(run, ["torch"], ["a"])
    assert not (run / "git.patch").exists()


def test_json_lines_are_values_of_any_kind_without_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n3\n{"torn": \n[1]\n"\xff\xe2\x80\xa8"\n[2')
    assert list(read_json_lines(path)) == [{"a": 1}, 3, [1], "\ufffd\u2028"]
    assert list(read_events(path)) == [{"a": 1}]
    assert list(read_json_lines(tmp_path / "nothing")) == []

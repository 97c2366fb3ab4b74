"""scripts/release.sh and scripts/index_names.py. Hatch is a script here that writes down its arguments: the steps take minutes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RELEASES = tomllib.loads((ROOT / "scripts/releases.toml").read_text())
MEMBERS = {
    tomllib.loads((path / "pyproject.toml").read_text())["project"]["name"]: path.relative_to(ROOT)
    for path in [*ROOT.glob("packages/*"), *ROOT.glob("apps/*")]
}
_HATCH = """#!/bin/sh
echo "$@" >> "$COMMANDS"
case "$*" in $FAILS) exit 3 ;; esac
if [ "$1" = build ]; then mkdir dist; for name in $NAMES; do touch "dist/$name-7.8.9.tar.gz"; done; fi
"""


def _git(folder: Path, *args: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(["git", *who, *args], cwd=folder, check=True, capture_output=True, text=True).stdout  # fmt: skip


class Clone:
    """A repository with the distributions of this one at version 7.8.9, each with its tag."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        for path in MEMBERS.values():
            (self.folder / path).mkdir(parents=True)
            text = (ROOT / path / "pyproject.toml").read_text()
            text = re.sub(r'^version = ".+"$', 'version = "7.8.9"', text, flags=re.MULTILINE)
            (self.folder / path / "pyproject.toml").write_text(text)
            (self.folder / path / "CHANGELOG.md").write_text("# Changelog\n\n## [7.8.9] - 2026-01-02\n")  # fmt: skip
        for name in ("scripts/release.sh", "tests/resume/golden/7.8.9/job.toml"):
            (self.folder / name).parent.mkdir(parents=True)
            (self.folder / name).touch()
        shutil.copy(ROOT / "scripts/release.sh", self.folder / "scripts")
        (self.folder / ".gitignore").write_text("dist/\n")
        _git(folder, "init", "-q", "clone")
        self.commit()
        self.tag()

        self.commands = folder / "commands"
        self.commands.touch()
        (folder / "bin").mkdir()
        (folder / "bin/hatch").write_text(_HATCH)
        (folder / "bin/hatch").chmod(0o755)
        self.path = f"{folder / 'bin'}:{os.environ['PATH']}"

    def commit(self) -> None:
        _git(self.folder, "add", "-A")
        _git(self.folder, "commit", "-qm", "a commit", "--allow-empty")

    def tag(self) -> None:
        for name in MEMBERS:
            _git(self.folder, "tag", "-f", f"{name}-v7.8.9")

    def release(self, tag: str, fails: str = "nothing") -> subprocess.CompletedProcess[str]:
        names = " ".join(name.replace("-", "_") for name in MEMBERS)
        environ = {**os.environ, "PATH": self.path, "COMMANDS": str(self.commands), "FAILS": fails, "NAMES": names}  # fmt: skip
        command = ["bash", self.folder / "scripts/release.sh", tag]
        return subprocess.run(command, env=environ, capture_output=True, text=True)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_each_distribution_is_released_up_to_the_upload(clone: Clone) -> None:
    for name in MEMBERS:
        clone.commands.write_text("")
        done = clone.release(f"{name}-v7.8.9")
        assert done.returncode == 0, done.stderr
        wanted = ["index_names.py " + name, "build --all", "dev:smoke " + name, "pip install -q twine"]  # fmt: skip
        *steps, twine = clone.commands.read_text().splitlines()
        assert [s.endswith(w) for s, w in zip(steps, wanted, strict=True)] == [True] * 4
        assert twine.split()[1:] == ["twine", "check", "--strict", f"dist/{name.replace('-', '_')}-7.8.9.tar.gz"]  # fmt: skip

        # the lines for releases.toml
        ((key, row),) = tomllib.loads(done.stdout.partition("releases.toml:\n")[2]).items()
        assert key == name
        head = _git(clone.folder, "rev-parse", "HEAD").strip()
        assert (row["version"], str(row["date"]), row["commit"]) == ("7.8.9", "2026-01-02", head)


@pytest.mark.parametrize("tag", ["forge-moe-v7.8.8", "forge-v7.8.9", "forge-moe", ""])
def test_a_tag_of_another_version_or_name_is_rejected(clone: Clone, tag: str) -> None:
    if tag.endswith("8"):
        _git(clone.folder, "tag", tag)
    assert clone.release(tag).returncode == 1
    assert clone.commands.read_text() == ""


@pytest.mark.parametrize("change", ["commit", "edit", "changelog", "day", "golden"])
def test_a_release_that_is_not_prepared_is_rejected(clone: Clone, change: str) -> None:
    changelog = clone.folder / MEMBERS["forge-moe"] / "CHANGELOG.md"
    if change == "golden":
        shutil.rmtree(clone.folder / "tests/resume/golden/7.8.9")
    elif change in ("changelog", "day"):
        changelog.write_text("## [7.8.9]\n" if change == "day" else "## [7.8.8] - 2026-01-02\n")
    elif change == "edit":
        changelog.write_text(changelog.read_text() + "more\n")
    if change != "edit":
        clone.commit()
    if change in ("changelog", "day", "golden"):
        clone.tag()
    assert clone.release("forge-moe-v7.8.9").returncode == 1
    assert clone.commands.read_text() == ""


@pytest.mark.parametrize("step", ["*index_names*", "build*", "*smoke*", "*pip*", "*check*"])
def test_a_step_that_fails_fails_the_release(clone: Clone, step: str) -> None:
    done = clone.release("forge-train-v7.8.9", fails=step)
    assert done.returncode == 3
    assert "releases.toml" not in done.stdout


@pytest.mark.parametrize(
    ("versions", "code"),
    [((), 0), (("0.2.0",), 0), (("0.2.0", "9.9"), 1), (("0.1.0",), 1)],
    ids=["free", "ours", "a version of another project", "never uploaded"],
)
def test_names_of_other_projects_on_the_index_are_found(
    versions: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    for name, found in (("hatchling", ("1.0",)), ("forge-moe", versions)):
        (tmp_path / name).mkdir()
        files = [f"{name.replace('-', '_')}-{version}-py3-none-any.whl" for version in found]
        links = "".join(f'<a href="{file}">{file}</a>' for file in files)
        (tmp_path / name / "index.html").write_text(f"<html><body>{links}</body></html>")
    command = [sys.executable, ROOT / "scripts/index_names.py", "forge-moe"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": tmp_path.as_uri()}
    assert subprocess.run(command, env=environ).returncode == code

    # without an index nothing is compared
    shutil.rmtree(tmp_path / "hatchling")
    assert subprocess.run(command, env=environ).returncode == 0


def test_only_our_distributions_are_asked_for(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts/index_names.py", "forge-core"]
    environ = {**os.environ, "PIP_INDEX_URL": tmp_path.as_uri()}
    assert subprocess.run(command, env=environ).returncode == 1


def test_releases_are_commits_of_this_repository_with_that_version() -> None:
    assert RELEASES.keys() <= MEMBERS.keys()
    if _git(ROOT, "rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("a shallow clone has no commits of releases")
    for name, row in RELEASES.items():
        _git(ROOT, "merge-base", "--is-ancestor", row["commit"], "HEAD")
        project = tomllib.loads(_git(ROOT, "show", f"{row['commit']}:{MEMBERS[name]}/pyproject.toml"))  # fmt: skip
        assert project["project"]["version"] == row["version"]
        day = re.escape(f"## [{row['version']}] - {row['date']}")
        assert re.search(f"^{day}$", (ROOT / MEMBERS[name] / "CHANGELOG.md").read_text(), re.M)

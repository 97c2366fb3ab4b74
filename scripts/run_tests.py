"""Choose and run the tests of a change: what `hatch test` does. docs/testing.md describes the lanes.

    hatch test                         # the tests of what differs from the default branch
    hatch test -- --since HEAD~3       # ... from another commit
    hatch test packages/forge-moe      # a folder, file or test: as pytest, without a choice

Changed files of packages and applications select all quick tests of these, and the tests marked `test` of what depends
on them. Without such a change, a merge base or git, the tests marked `test` of everything run. Other arguments go to
pytest.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / "tests" / "durations.json"
PYTEST = [sys.executable, "-m", "pytest", "-n", "2", "--dist=loadfile", "--no-loadscope-reorder"]
_LIMIT_SECONDS = 180.0
_START_SECONDS = 25.0  # two workers import torch and collect
_MARKED = re.compile(r"""lane\([^)]*["']test["']""")


class Selection(NamedTuple):
    """Folders of packages whose quick tests all run, folders whose tests marked `test` run, and why."""

    whole: list[str]
    marked: list[str]
    why: str


def members() -> dict[str, Path]:
    """Folders of packages and applications by the name of their distribution."""
    found = {}
    for pattern in ("packages/*", "apps/*"):
        for folder in sorted(ROOT.glob(pattern)):
            if (folder / "pyproject.toml").exists():
                project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
                found[project["name"]] = folder
    return found


def dependents() -> dict[str, set[str]]:
    """Folders that depend on each folder, as their requirements say."""
    known = members()
    found: dict[str, set[str]] = {_name(folder): set() for folder in known.values()}
    for folder in known.values():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for requirement in project.get("dependencies", []):
            name = re.split(r"[\[<>=!~ ;]", requirement)[0]
            if name in known:
                found[_name(known[name])].add(_name(folder))
    return found


def _name(folder: Path) -> str:
    return str(folder.relative_to(ROOT))


def selected_by(changed: Iterable[str]) -> Selection:
    """The tests of changed files, given relative to the repository."""
    above = dependents()
    touched: dict[str, list[str]] = {}
    for file in changed:
        folder = "/".join(file.split("/")[:2])
        if folder in above:
            touched.setdefault(folder, []).append(file)
    if not touched:
        return Selection([], ["packages", "apps", "tests"], "no package or application differs")
    below = {f for f, files in touched.items() if any("/tests/" not in file for file in files)}
    further: set[str] = set()
    for folder in below:
        further |= above[folder]
    marked = sorted(further - touched.keys()) + (["tests"] if below else [])
    why = "; ".join(f"{folder} differs ({_files(touched[folder])})" for folder in sorted(touched))
    return Selection(sorted(touched), marked, why)


def _files(files: list[str]) -> str:
    return files[0] if len(files) == 1 else f"{len(files)} files"


def changed_files(since: str | None) -> tuple[list[str], str]:
    """Files that differ from the merge base with the default branch, and the base; none and why if there is none."""
    try:
        base = since or _git("merge-base", "HEAD", _default_branch()).strip()
        names = _git("diff", "--name-only", "--no-renames", base, "--").splitlines()
        names += _git("ls-files", "--others", "--exclude-standard").splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        if since is not None:
            sys.exit(f"--since {since}: git knows no such commit; give a branch, tag or commit")
        return [], f"no merge base ({type(error).__name__})"
    return names, base[:12]


def _default_branch() -> str:
    for name in ("origin/HEAD", "origin/main", "main", "master"):
        try:
            return _git("rev-parse", "--verify", "--quiet", name).strip()
        except subprocess.CalledProcessError:
            continue
    raise OSError("no default branch")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def files_with_marks(folders: Iterable[str]) -> list[str]:
    """Test files of the folders that mark a test for the lane `test`; others need no collecting."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("test_*.py")):
            if _MARKED.search(path.read_text()):
                found.append(str(path.relative_to(ROOT)))
    return found


def estimate(selection: Selection) -> float:
    """Seconds on two quiet cores, from the recorded durations."""
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    total, longest = 0.0, 0.0
    for file, functions in known.items():
        whole = file.startswith(tuple(f"{folder}/" for folder in selection.whole))
        if not whole and not file.startswith(tuple(f"{f}/" for f in selection.marked)):
            continue
        lanes = ("test", "quick") if whole else ("test",)
        mine = sum(
            row["seconds"] * sum(row["cases"].get(lane, 0) for lane in lanes)
            for row in functions.values()
        )
        total, longest = total + mine, max(longest, mine)
    return _START_SECONDS + max(total / 2, longest)


def main() -> int:
    arguments = sys.argv[1:]
    since = None
    if "--since" in arguments:
        at = arguments.index("--since")
        if at + 1 == len(arguments):
            sys.exit("--since needs a commit, branch or tag")
        since = arguments[at + 1]
        del arguments[at : at + 2]
    if any(not a.startswith("-") and (ROOT / a.partition("::")[0]).exists() for a in arguments):
        return subprocess.call([*PYTEST, *arguments], cwd=ROOT)
    names, base = changed_files(since)
    selection = selected_by(names)
    paths = [*selection.whole, *files_with_marks(selection.marked)]
    seconds = estimate(selection)
    if seconds > _LIMIT_SECONDS:
        print(
            f"about {seconds / 60:.0f} minutes: this change has more tests than fit into {_LIMIT_SECONDS:.0f} s"
        )
    whole = f"quick tests of {', '.join(selection.whole)}, and " if selection.whole else ""
    print(f"{whole}the tests marked `test` of {', '.join(selection.marked) or 'nothing'}: "
          f"{selection.why} since {base}", flush=True)  # fmt: skip
    options = ["--lane", "test", *(f"--all-quick-of={folder}" for folder in selection.whole)]
    return subprocess.call([*PYTEST, *options, *arguments, *paths], cwd=ROOT, env=os.environ)


if __name__ == "__main__":
    sys.exit(main())

"""Which tests a lane has, and what `hatch test` selects for a change."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import run_tests

from forge_testing import references

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.lane("test")

FILE = """
import pytest

def test_plain(): pass

@pytest.mark.lane("test")
def test_chosen(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.slow
@pytest.mark.lane("ci")
def test_gate(): pass

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_cases(n): pass

@pytest.mark.needs_torch("99.0")
def test_future(): raise AssertionError
"""


def run_pytest(folder: Path, *arguments: str, workers: int = 0) -> tuple[int, dict[str, str]]:
    """Exit code, and the outcome of each test of FILE that ran, by its worker if there are some."""
    (folder / "packages").mkdir(exist_ok=True)
    (folder / "packages" / "test_file.py").write_text(FILE)
    (folder / "test_other.py").write_text(FILE)
    shutil.copy(ROOT / "conftest.py", folder)
    (folder / "tests").mkdir(exist_ok=True)
    marks = ["lane", "slow", "needs_torch", "distributed", "cpu_only", "gpu"]
    ini = "[pytest]\nmarkers =\n" + "".join(f"  {mark}: a mark\n" for mark in marks)
    (folder / "pytest.ini").write_text(ini)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v"]
    command += ["-n", str(workers)] if workers else ["-p", "no:xdist"]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines() if "::" in line and "%" in line]
    return done.returncode, {words[0]: words[1] for words in lines}


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("lane", "names"),
    [
        ("test", {"chosen"}),
        ("quick", {"chosen", "plain", "cases[1]", "future"}),
        ("ci", {"chosen", "plain", "cases[1]", "future", "gate"}),
        ("everything", {"chosen", "plain", "cases[1]", "cases[2]", "future", "gate", "slow"}),
    ],
)
def test_each_lane_has_its_tests(tmp_path: Path, lane: str, names: set[str]) -> None:
    code, found = run_pytest(tmp_path, "--lane", lane, "test_other.py")
    assert code == 0
    assert found.keys() == {f"test_other.py::test_{name}" for name in names}
    assert found.get("test_other.py::test_future", "SKIPPED") == "SKIPPED"


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_quick_is_the_default_and_a_named_test_runs_in_any_case(tmp_path: Path) -> None:
    assert len(run_pytest(tmp_path, "test_other.py")[1]) == 4
    code, found = run_pytest(tmp_path, "test_other.py::test_slow")
    assert (code, list(found)) == (0, ["test_other.py::test_slow"])


@pytest.mark.lane("quick")
def test_all_quick_tests_of_a_folder_join_the_chosen_of_others(tmp_path: Path) -> None:
    options = ("--lane", "test", "--all-quick-of", "packages", "packages", "test_other.py")
    _, found = run_pytest(tmp_path, *options)
    assert len([name for name in found if name.startswith("packages/")]) == 4
    assert [name for name in found if "other" in name] == ["test_other.py::test_chosen"]


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_an_unknown_lane_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text(
        'import pytest\n\n@pytest.mark.lane("tset")\ndef test_it(): pass\n'
    )
    assert run_pytest(tmp_path, "test_bad.py")[0] == pytest.ExitCode.USAGE_ERROR


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_random_order_is_that_of_its_seed(tmp_path: Path) -> None:
    orders = [
        list(run_pytest(tmp_path, "--random-order", seed, "test_other.py", "packages")[1])
        for seed in ("1", "1", "2")
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_after_the_tests_that_passed(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "passed.txt"
    assert run_pytest(tmp_path, "--passed", str(path), "test_other.py", workers=workers)[0] == 0
    names = path.read_text().splitlines()
    assert len(names) == len(set(names)) == 4
    path.write_text("\n".join(names[1:]) + "\n")
    again = run_pytest(tmp_path, "--passed", str(path), "test_other.py", workers=workers)
    assert (again[0], len(again[1])) == (0, 1)
    assert path.read_text().splitlines() == [*names[1:], names[0]]


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_durations_are_medians_of_functions_with_the_cases_of_each_lane(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    path.write_text('{"gone.py": {"test_it": {"seconds": 1.0, "cases": {"quick": 1}}}}')
    run_pytest(tmp_path, "--lane", "everything", "--write-durations", str(path), "test_other.py")
    known = json.loads(path.read_text())
    assert known.keys() == {"test_other.py"}
    assert known["test_other.py"]["test_cases"]["cases"] == {"quick": 1, "everything": 1}
    assert known["test_other.py"]["test_gate"]["cases"] == {"ci": 1}


# ---- what a change selects


def test_a_package_selects_itself_and_the_marked_tests_of_its_dependents() -> None:
    found = run_tests.selected_by(["packages/forge-core/src/forge_core/lora.py", "README.md"])
    assert found.whole == ["packages/forge-core"]
    assert found.marked == ["apps/lab", "apps/train", "packages/forge-vlm", "tests"]
    found = run_tests.selected_by(["packages/forge-moe/src/forge_moe/layer.py"])
    assert (found.whole, found.marked) == (["packages/forge-moe"], ["apps/train", "tests"])
    found = run_tests.selected_by(["apps/train/src/forge_train/cli.py"])
    assert (found.whole, found.marked) == (["apps/train"], ["apps/lab", "tests"])


def test_tests_of_a_package_select_no_dependents() -> None:
    found = run_tests.selected_by(["packages/forge-core/tests/test_lora.py"])
    assert (found.whole, found.marked) == (["packages/forge-core"], [])


@pytest.mark.parametrize(
    "changed", [[], ["docs/log.md", "tests/lanes/test_lanes.py", "conftest.py"]]
)
def test_anything_else_selects_the_marked_tests_of_everything(changed: list[str]) -> None:
    found = run_tests.selected_by(changed)
    assert (found.whole, found.marked) == ([], ["packages", "apps", "tests"])


def test_files_with_marked_tests_are_found_in_each_folder() -> None:
    for folder in (*run_tests.dependents(), "tests"):
        assert run_tests.files_with_marks([folder]), folder


def test_differences_are_taken_from_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        own = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *own, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    assert run_tests.changed_files(None)[0] == []  # no repository
    git("init", "-b", "main")
    (tmp_path / "kept").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    assert run_tests.changed_files(None)[0] == []
    git("checkout", "-b", "change")
    (tmp_path / "kept").write_text("2")
    git("commit", "-am", "two")
    (tmp_path / "new").write_text("3")
    assert run_tests.changed_files(None)[0] == ["kept", "new"]
    assert run_tests.changed_files("HEAD")[0] == ["new"]
    with pytest.raises(SystemExit, match="--since nowhere:"):  # prose: flag and value
        run_tests.changed_files("nowhere")


# ---- references of a session


def test_a_reference_is_made_once_and_handed_out_in_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(references.SESSION, str(tmp_path))
    made = []

    def make(folder: Path) -> list[int]:
        made.append(folder)
        (folder / "file").write_text("text")
        return [1, 2]

    first = references.once("key", make, tmp_path / "a")
    first.append(3)
    (tmp_path / "a" / "file").write_text("changed")
    assert references.once("key", make, tmp_path / "b") == [1, 2]
    assert (tmp_path / "b" / "file").read_text() == "text"
    assert len(made) == 1
    references.once("another key", make)
    monkeypatch.setattr(references, "digest_of_sources", lambda: "other sources")
    references.once("key", make)
    assert len(made) == 3


def test_a_maker_that_fails_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(references.SESSION, str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        references.once("key", fail)
    assert references.once("key", lambda folder: sorted(folder.iterdir())) == []

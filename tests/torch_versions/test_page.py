"""The bounds of torch are what the suite has seen, and the page says what the runs wrote."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from forge_resilience.health import machine

from .page import PAGE, ROOT, ROWS, bound, page, seen, supported
from .run_suite import Results

pytestmark = pytest.mark.lane("test")

ROWS_OF_RUNS: list[dict[str, Any]] = json.loads(ROWS.read_text())


def fits(limits: SpecifierSet, versions: list[Version]) -> bool:
    """Whether the limits begin at the oldest version and end with the minor number of the newest."""
    oldest, newest = min(versions), max(versions)
    return limits == SpecifierSet(f">=2.{oldest.minor},<2.{newest.minor + 1}")


def test_the_page_is_the_one_of_the_rows() -> None:
    assert PAGE.read_text() == page(ROWS_OF_RUNS)


def test_bounds_are_those_of_versions_that_the_suite_has_seen() -> None:
    assert fits(bound(), seen(ROWS_OF_RUNS)), (bound(), seen(ROWS_OF_RUNS))


def test_a_bound_without_a_run_is_seen() -> None:
    versions = [Version("2.11.0"), Version("2.15.0")]
    assert fits(SpecifierSet(">=2.11,<2.16"), versions)
    assert not fits(SpecifierSet(">=2.11,<2.17"), versions)
    assert not fits(SpecifierSet(">=2.10,<2.16"), versions)


@pytest.mark.parametrize("change", ["failed", "lacking"])
def test_a_version_with_a_failure_or_without_a_package_is_not_seen(change: str) -> None:
    newest = str(max(seen(ROWS_OF_RUNS)))
    rows = [dict(row) for row in ROWS_OF_RUNS]
    wanted = next(r for r in rows if (r["torch"], r["folder"]) == (newest, "packages/forge-moe"))
    if change == "failed":
        wanted["failed"] = 1
    else:
        rows = [r for r in rows if (r["torch"], r["folder"]) != (newest, "packages/forge-moe")]
    assert Version(newest) not in seen(rows)


def test_all_places_name_the_same_bounds() -> None:
    pattern = r"torch[<>]=?2\.[0-9]+,[<>]=?2\.[0-9]+"
    command = ["git", "-C", str(ROOT), "grep", "-hoE", pattern, "--", "*.py", "*.toml", "*.md"]
    command.append(":!tests/torch_versions")
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(found) > 10
    assert {SpecifierSet(text.removeprefix("torch")) for text in found} == {bound()}


def test_doctor_takes_the_versions_within_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for minor in range(5, 30):
        monkeypatch.setattr(torch, "__version__", f"2.{minor}.0+cpu")
        assert (machine._torch().state == machine.OK) == (f"2.{minor}.0" in bound()), minor


def test_lanes_are_within_the_bounds_and_their_names_are_the_oldest_and_newest() -> None:
    versions = supported()
    assert versions == sorted(versions, key=Version)
    assert all(version in bound() for version in versions)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"][
        "default"
    ]["scripts"]
    found = {
        name: re.findall(r"hatch run torch\.([\d.]+):", text) for name, text in scripts.items()
    }
    assert found["torch-newest"] == [versions[-1]]
    assert found[f"torch-2.{Version(versions[0]).minor}"] == [versions[0]]


def test_results_are_counted_by_folder_and_lane() -> None:
    results = Results()

    def report(name: str, when: str, outcome: str, *keywords: str) -> None:
        words = dict.fromkeys(keywords, 1)
        longrepr: Any = ("file", 1, "Skipped: no GPU") if outcome == "skipped" else None
        results.pytest_runtest_logreport(
            pytest.TestReport(name, ("file", 1, name), words, outcome, longrepr, when)  # type: ignore[arg-type]
        )

    for when in ("setup", "call", "teardown"):
        report("tests/a/test_one.py::test[x@y]", when, "passed")
        report("packages/b/tests/test_two.py::test", when, "passed", "slow")
        report(
            "packages/b/tests/test_two.py::test_leak",
            when,
            "failed" if when == "teardown" else "passed",
        )
    report("packages/b/tests/test_two.py::test_gpu", "setup", "skipped")
    rows = {(row.pop("folder"), row.pop("lane")): row for row in results.rows()}
    assert {key: (r["passed"], r["failed"], r["skipped"]) for key, r in rows.items()} == {
        ("tests/a", "quick"): (1, 0, 0),
        ("packages/b", "slow"): (1, 0, 0),
        ("packages/b", "quick"): (0, 1, 1),
    }
    assert rows["packages/b", "quick"]["failures"] == ["packages/b/tests/test_two.py::test_leak"]
    assert rows["packages/b", "quick"]["skips"] == {"no GPU": 1}

"""Run the suite with the torch that is installed, and write down the results.

    hatch run torch-newest                                  # all tests with the newest torch that is supported
    hatch run torch-2.11 --lane quick packages/forge-moe    # the quick tests of a folder; other rows stay
    hatch run torch-own                                     # with the torch of constraints.txt

Writes a row per folder and lane to docs/data/torch-versions.json, and docs/torch-versions.md. Tests that failed run once more,
one after another: those that pass then count as passed, and stay in the row by name. Leaves with 1 if a test failed
twice, and writes nothing if pytest was interrupted.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_testing.commits import short_commit

from .page import PAGE, ROWS, identity, page

ROOT = Path(__file__).resolve().parents[2]
#: Without the tests of the rows themselves, whose own row would judge itself.
FOLDERS = sorted(
    str(tests.relative_to(ROOT)).removesuffix("/tests")
    for pattern in ("packages/*/tests", "apps/*/tests", "tests/*")
    for tests in ROOT.glob(pattern)
    if any(tests.glob("test_*.py")) and tests.name != "torch_versions"
)
#: They fork by themselves, which a process of a CUDA build cannot do after a backward: a process for them alone.
FORKS = (
    "packages/forge-parallel/tests/test_prove.py",
    "packages/forge-parallel/tests/test_tensor_odd.py",
)
SOURCES = ("packages", "apps", "tests", "conftest.py", "constraints.txt")
EXPRESSIONS = {"quick": "not slow", "slow": "slow", "all": "slow or not slow"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders", nargs="*", help="as packages/forge-moe or tests/resume; default: all"
    )
    parser.add_argument("--lane", choices=EXPRESSIONS, default="all")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if unknown := set(args.folders) - set(FOLDERS):
        parser.error(f"{' '.join(sorted(unknown))}: none of {' '.join(FOLDERS)}")
    commit, results = short_commit(ROOT, SOURCES), Results()
    _run(results, args.folders or FOLDERS, EXPRESSIONS[args.lane], args.workers)
    common = {
        "torch": torch.__version__.split("+")[0],
        "build": f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU",
        "python": platform.python_version(),
        "commit": commit,
    }
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else []
    write([*rows, *({**common, **row} for row in results.rows())])
    sys.exit(any(outcome == "failed" for outcome in results.outcomes.values()))


class Results:
    """A pytest plugin that keeps the outcome of each test; with pytest-xdist, in the process that starts workers."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.repeated: set[str] = set()
        self._lanes: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._warnings: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self._lanes[name] = "slow" if "slow" in report.keywords else "quick"
        if report.failed:
            self.outcomes[name] = "failed"
        elif report.skipped:
            self.outcomes[name] = "skipped"
            self._reasons[name] = _reason(report)
        elif report.when == "call":
            self.outcomes[name] = "passed"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed"

    def pytest_warning_recorded(self, warning_message: Any, nodeid: str) -> None:
        kind, text = warning_message.category, " ".join(str(warning_message.message).split())
        if issubclass(kind, FutureWarning | DeprecationWarning) and "torch" in text and nodeid:
            self._warnings[_folder(nodeid)].add(f"{kind.__name__}: {text[:200]}")

    def failed(self) -> list[str]:
        return sorted(name for name, outcome in self.outcomes.items() if outcome == "failed")

    def rows(self) -> list[dict[str, Any]]:
        """A row per folder and lane."""
        names: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for name in sorted(self.outcomes):
            names[_folder(name), self._lanes.get(name, "quick")].append(name)
        return [
            {"folder": folder, "lane": lane, **self._row(members), "warnings": sorted(self._warnings[folder])}
            for (folder, lane), members in names.items()
        ]  # fmt: skip

    def _row(self, names: list[str]) -> dict[str, Any]:
        counts = Counter(self.outcomes[name] for name in names)
        return {
            **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
            "failures": [name for name in names if self.outcomes[name] == "failed"],
            "passed_alone": [
                name for name in names if name in self.repeated and self.outcomes[name] == "passed"
            ],
            "skips": dict(
                Counter(self._reasons[n] for n in names if self.outcomes[n] == "skipped")
            ),
        }


def _run(results: Results, folders: list[str], expression: str, workers: int) -> None:
    """All tests of the folders, those that fork in a process of their own, then those that failed, alone."""
    apart = [file for file in FORKS if _folder(file) in folders]
    _pytest(results, *folders, f"--deselect={FORKS[0]}", f"--deselect={FORKS[1]}", f"-n{workers}", "-m", expression)  # fmt: skip
    if apart:
        _pytest(results, *apart, "-n1", "-m", expression)
    results.repeated.update(results.failed())
    if results.repeated:
        _pytest(results, *sorted(results.repeated), "-n1", "-m", EXPRESSIONS["all"])


def _pytest(results: Results, *arguments: str) -> None:
    code = pytest.main(
        ["--dist=loadfile", "--no-loadscope-reorder", "--lane=everything", *arguments],
        plugins=[results],
    )
    if code not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        sys.exit(f"pytest ended with {code!r}: nothing is written")


def write(rows: list[dict[str, Any]]) -> None:
    """Write the rows, of those with the same version, build, folder and lane the last, and the page."""
    last = {identity(row): row for row in rows}
    kept = [last[key] for key in sorted(last)]
    ROWS.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    PAGE.write_text(page(kept))


def _folder(name: str) -> str:
    return "/".join(name.split("::")[0].split("/")[:2])


def _reason(report: pytest.TestReport) -> str:
    where = report.longrepr
    return str(where[2] if isinstance(where, tuple) else where).removeprefix("Skipped: ")


if __name__ == "__main__":
    main()

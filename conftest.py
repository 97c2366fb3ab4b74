"""Lanes of the tests, their order, and what holds for all of them. docs/testing.md describes the lanes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent
DURATIONS = ROOT / "tests" / "durations.json"
SESSION = "FORGE_TEST_SESSION"  # the folder of forge_testing.references
TORCH = tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2])
LANES = ("test", "quick", "ci", "everything")  # each has all tests of the one before it
_RANK = {lane: number for number, lane in enumerate(LANES)}

# Workers share the cores. Two of them with two threads each wait for one another at the end of every small operator:
# three runs of a second took twelve. torch reads it when it is imported, and so does what tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks", "ranks of tests that are marked distributed")
    group.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: NCCL, a GPU a rank"
    )
    group.addoption("--nproc", type=int, help="GPUs to use with --device cuda (default: all)")
    group = parser.getgroup("lanes", "which tests run, and in which order")
    group.addoption(
        "--lane", choices=LANES, help="default: quick; everything for tests that are named with ::"
    )
    group.addoption(
        "--all-quick-of", action="append", default=[], metavar="FOLDER",
        help="with --lane test: all quick tests of this folder, too",
    )  # fmt: skip
    group.addoption(
        "--random-order", metavar="SEED", help="files, and tests of a file, in random order"
    )
    group.addoption("--write-durations", metavar="FILE", help="JSON: seconds of each test function")
    group.addoption(
        "--passed",
        metavar="FILE",
        help="leave out the tests that it lists, and add those that pass",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A suite under nohup ignores SIGHUP, and would hand that on to the processes that it tests.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if SESSION not in os.environ:  # workers of xdist inherit it
        os.environ[SESSION] = tempfile.mkdtemp(prefix="forge-tests-")
        config.add_cleanup(_end_session)
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Durations(config), "forge-durations")
    if config.getoption("--passed") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Passed(config), "forge-passed")
    device, nproc = config.getoption("--device"), config.getoption("--nproc")
    if (device, nproc) == ("cpu", None):
        return
    from forge_testing.devices import choose

    try:
        choose(device, nproc)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["passed"] = sorted(_passed_before(node.config))


def _end_session() -> None:
    shutil.rmtree(os.environ.pop(SESSION), ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before -m chooses, and before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_cuda = config.getoption("--device") == "cuda"
    lane = config.getoption("--lane") or ("everything" if _named(config) else "quick")
    left: list[pytest.Item] = []
    out: list[pytest.Item] = []
    whole = tuple(f"{folder.rstrip('/')}/" for folder in config.getoption("--all-quick-of"))
    passed = _passed_before(config)
    for item in items:
        own = _lane_of(item)
        item.user_properties.append(("lane", own))
        wanted = "quick" if lane == "test" and item.nodeid.startswith(whole) else lane
        is_left = _RANK[own] <= _RANK[wanted] and item.nodeid not in passed
        (left if is_left else out).append(item)
    if out:
        config.hook.pytest_deselected(items=out)
    for item in left:
        if on_cuda and (mark := item.get_closest_marker("cpu_only")):
            item.add_marker(pytest.mark.skip(reason=f"cpu_only: {mark.kwargs['reason']}"))
        for mark in item.iter_markers("needs_torch"):
            needed = tuple(int(part) for part in mark.args[0].split("."))
            if needed > TORCH:
                item.add_marker(pytest.mark.skip(f"needs torch {mark.args[0]}"))
    items[:] = _ordered(left, config.getoption("--random-order"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Each test begins with the same random state, so that its order in a worker changes no value.

    Handlers of signals end with the test: a child that a later test forks would not end at SIGTERM. So does a process
    group, which a later test would take for its own.
    """
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return (yield)
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        if "forge_parallel.start.group" in sys.modules:
            sys.modules["forge_parallel.start.group"].end_process_group(wait=False)


def _passed_before(config: pytest.Config) -> set[str]:
    """Names in the file of `--passed`. Workers of xdist get those of the first process, which all must have alike."""
    if hasattr(config, "workerinput"):
        return set(config.workerinput["passed"])
    path = config.getoption("--passed")
    return set(Path(path).read_text().splitlines()) if path and Path(path).exists() else set()


def _named(config: pytest.Config) -> bool:
    return any("::" in str(argument) for argument in config.args)


def _lane_of(item: pytest.Item) -> str:
    """The smallest lane that has the test: `quick` unless it is marked slow, `test` or `ci` if it is marked so.

    `lane("quick")` on a function takes it out of the lane `test` of its module.
    """
    near_first = [name for mark in item.iter_markers("lane") for name in mark.args]
    if unknown := set(near_first) - {"test", "quick", "ci"}:
        raise pytest.UsageError(
            f"{item.nodeid}: lane {sorted(unknown)} must be 'test', 'quick' or 'ci'"
        )
    if item.get_closest_marker("slow") is not None:
        return "ci" if "ci" in near_first else "everything"
    return next((name for name in near_first if name in ("test", "quick")), "quick")


def _ordered(items: list[pytest.Item], seed: str | None) -> list[pytest.Item]:
    """Files with the longest work first, so that no worker is left with a long one; tests of a file stay together."""
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)
    if seed is not None:
        chance = random.Random(seed)
        for group in files.values():
            chance.shuffle(group)
        names = sorted(files)
        chance.shuffle(names)
        return [item for name in names for item in files[name]]
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}

    def seconds(name: str) -> float:
        rows = known.get(name, {})
        functions = [getattr(item, "originalname", item.name) for item in files[name]]
        return sum(rows[f]["seconds"] if f in rows else 1.0 for f in functions)

    return [item for name in sorted(files, key=seconds, reverse=True) for item in files[name]]


class _Passed:
    """Names of the tests that passed or were skipped, one a line. A run that was ended continues after them."""

    def __init__(self, config: pytest.Config) -> None:
        self.path = Path(config.getoption("--passed"))
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self.failed:
            with self.path.open("a") as file:
                file.write(report.nodeid + "\n")


class _Durations:
    """Seconds of each test function, the median over its cases, and how many cases each lane adds."""

    def __init__(self, config: pytest.Config) -> None:
        self.path = Path(config.getoption("--write-durations"))
        self.seconds: dict[str, float] = defaultdict(float)
        self.lanes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        self.lanes[report.nodeid] = dict(report.user_properties).get("lane", "quick")

    def pytest_sessionfinish(self) -> None:
        """Functions of the files that ran are written anew; other files keep what they have."""
        cases: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name in self.seconds:
            file, _, function = name.partition("::")
            cases[file][function.partition("[")[0]].append(name)
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        known = {file: rows for file, rows in known.items() if (ROOT / file).exists()}
        for file, functions in cases.items():
            known[file] = {
                function: {
                    "seconds": round(statistics.median(self.seconds[name] for name in names), 2),
                    "cases": dict(Counter(self.lanes.get(name, "quick") for name in names)),
                }
                for function, names in functions.items()
            }
        lines = [
            f" {json.dumps(file)}: {json.dumps(rows, sort_keys=True)}"
            for file, rows in sorted(known.items())
        ]
        self.path.write_text("{\n" + ",\n".join(lines) + "\n}\n")

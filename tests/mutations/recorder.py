"""A pytest plugin: which tests run, in which order, with which limit, and what became of them.

FORGE_RECORD names a JSON file that it writes: of each test the outcome, its seconds and the lane that it is in.
FORGE_SELECT names a JSON file with the seconds of the tests to run: shortest first; a test that takes ten times as long
(and more than a minute) fails, so that ranks that wait for each other end.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_found: dict[str, dict[str, Any]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    row = _found.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
    row["seconds"] += report.duration
    row |= {name: value for name, value in report.user_properties if name == "lane"}
    if report.outcome != "passed" and row["outcome"] != "failed":
        row["outcome"] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("FORGE_RECORD")
    if path and not hasattr(session.config, "workerinput"):
        Path(path).write_text(json.dumps(_found))


def _selected() -> dict[str, float] | None:
    path = os.environ.get("FORGE_SELECT")
    return json.loads(Path(path).read_text()) if path else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = _selected()
    if selected is None:
        return
    out = [item for item in items if item.nodeid not in selected]
    config.hook.pytest_deselected(items=out)
    left = [item for item in items if item.nodeid in selected]
    items[:] = sorted(left, key=lambda item: selected[item.nodeid])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    selected = _selected()
    if selected is None:
        return (yield)

    def expired(*_: Any) -> None:
        raise TimeoutError(f"{item.nodeid} took longer than {limit:.0f} s")

    limit = max(60.0, 10 * selected[item.nodeid])
    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

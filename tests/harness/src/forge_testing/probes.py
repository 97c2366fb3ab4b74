"""A device that computes wrong, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from forge_resilience.health import BROKEN, Finding

# Any: their names are replaced, and are no public ones
check: Any = importlib.import_module("forge_resilience.health.check")
probes: Any = importlib.import_module("forge_resilience.health.probes")


@contextlib.contextmanager
def wrong_results(is_wrong: Callable[[], bool]) -> Iterator[list[Any]]:
    """Health checks of this process find a broken device while `is_wrong()`; how they were asked is appended to the list."""
    asked: list[Any] = []
    kept = check.known_answer, probes.memory_patterns, check.arrived

    def known_answer(device: Any, seed: int) -> Finding:
        if is_wrong():
            return Finding("computing", BROKEN, "a wrong product", "sums are exact")
        return kept[0](device, seed)

    def memory_patterns(device: Any, mib: int | None) -> Finding:
        asked.append(("mib", mib))
        return kept[1](device, mib)

    def arrived(group: Any, timeout_seconds: float) -> Any:
        asked.append(("seconds", timeout_seconds))
        return kept[2](group, timeout_seconds)

    check.known_answer, probes.memory_patterns, check.arrived = (
        known_answer,
        memory_patterns,
        arrived,
    )
    try:
        yield asked
    finally:
        check.known_answer, probes.memory_patterns, check.arrived = kept

"""Loops of other code bases with some packages of Forge: all others cannot be imported in them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from tests.foreign.only import Only


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "uses(*packages): the packages of Forge that a loop imports")


@pytest.fixture(autouse=True)
def only_the_used_packages(request: pytest.FixtureRequest) -> Iterator[None]:
    marker = request.node.get_closest_marker("uses")
    if marker is None:  # a test that starts programs through only.py
        yield
        return
    hidden = [n for n in sys.modules if _is_forge(n) and n.partition(".")[0] not in marker.args]
    kept = {name: sys.modules.pop(name) for name in hidden}
    finder = Only(marker.args)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(kept)


def _is_forge(name: str) -> bool:
    return name.startswith("forge_")

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forge_testing.warm import WarmProcess

from .page import warm_process


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmProcess]:
    """A process that has imported all that a run needs."""
    process = warm_process()
    yield process
    process.close()

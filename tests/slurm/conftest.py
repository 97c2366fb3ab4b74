"""A Slurm of our own for the tests of this folder; see tests/slurm/cluster.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.slurm.cluster import Slurm, running_cluster, why_not


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """The cluster of this session; skipped with the reason where none can run."""
    if reason := why_not():
        pytest.skip(reason)
    with running_cluster(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def slurm(cluster: Slurm) -> Iterator[Slurm]:
    """A real Slurm with all nodes idle: jobs of the test are cancelled, crashed nodes revived."""
    yield cluster
    cluster.tidy()

"""The short form of the story; `python -m tests.slurm.story` is the whole one."""

from __future__ import annotations

import pytest
from tests.slurm.story import SHORT, Run, compare, disturb

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_a_job_on_four_three_and_four_nodes_ends_like_an_undisturbed_one(slurm, tmp_path):
    reference = Run(slurm, tmp_path / "undisturbed", 40)
    reference.train_undisturbed(4)
    run = Run(slurm, tmp_path / "disturbed", 40)
    disturb(run, SHORT)
    assert compare(run, reference)["bits_equal_to_step"] >= 5

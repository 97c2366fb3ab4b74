"""The mistakes of `hatch run mutations` fit the tree as it stands; trying them is that command's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mistakes import MISTAKES, Mistake

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_changes_one_place_and_names_tests_that_are_there(mistake: Mistake) -> None:
    text = (ROOT / mistake.file).read_text()
    assert text.count(mistake.right) == 1, mistake.file
    for test in mistake.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(), test


def test_there_are_twenty_and_each_has_a_name_of_its_own() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 20


def test_mistakes_are_seen_by_the_tests_of_a_change() -> None:
    """And what tests/slow.txt leaves out of them exists."""
    slow = (ROOT / "tests/slow.txt").read_text().splitlines()
    assert slow == sorted(set(slow))
    for line in slow:
        file, _, name = line.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), line
    named = {test for mistake in MISTAKES for test in mistake.tests}
    assert not named & {line.partition("[")[0] for line in slow}

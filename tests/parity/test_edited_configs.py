"""Edited config.json files: the logits of transformers, or an error that names an edited key."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import transformers
from tests.parity.edited_configs import OWN, Keys, edits, outcome, several


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers warns about values, some of each edit."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.set_verbosity(before)
    transformers.utils.logging.enable_progress_bar()


def outcomes(family: str, chosen: dict[str, Keys], folder: Path) -> Counter[str]:
    found = [outcome(family, keys, folder / str(i)) for i, keys in enumerate(chosen.values())]
    return Counter(found)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_sample_of_edited_configs_is_read_as_by_transformers_or_rejected(tmp_path: Path) -> None:
    """200 files: 6 edits of one key and 6 or 7 of several in each family."""
    counts: Counter[str] = Counter()
    for number, family in enumerate(OWN):
        draw = Random(family)
        names = draw.sample(sorted(edits(family)), 6)
        chosen = {name: edits(family)[name] for name in names}
        chosen |= several(family, 6 + (number < 8), draw)
        (folder := tmp_path / family).mkdir()
        found = outcomes(family, chosen, folder)
        assert found["equal"] >= 5, (family, found)
        counts += found
    assert counts.total() == 200
    assert counts["equal"] > 110, counts
    assert counts["rejected"] > 40, counts


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN)
def test_all_edited_configs_are_read_as_by_transformers_or_rejected(
    family: str, tmp_path: Path
) -> None:
    counts = outcomes(family, edits(family), tmp_path)
    assert counts["equal"] > 70, counts
    assert counts["rejected"] > 70, counts


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN)
def test_edits_of_several_keys_are_read_as_by_transformers_or_rejected(
    family: str, tmp_path: Path
) -> None:
    counts = outcomes(family, several(family, 60, Random(family)), tmp_path)
    assert counts["equal"] > 20, counts

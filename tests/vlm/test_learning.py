"""A small model learns to see, answers by `generate`, and falls to chance without its pictures."""

import pytest
from tests.vlm.learn import FUSIONS, learn
from tests.vlm.tasks import CHANCE, EOS, batch_of, ids, picture

pytestmark = pytest.mark.lane("test")


@pytest.mark.slow
@pytest.mark.parametrize("fusion", FUSIONS[:1])
def test_the_color_of_a_square_needs_the_image(fusion: str) -> None:
    row = learn(fusion, "color", steps=150, held_out=120)
    assert float(str(row["right"])) >= 0.95, row
    assert float(str(row["ended"])) >= 0.99, row
    for control in ("right_blank", "right_shuffled"):
        assert float(str(row[control])) < CHANCE["color"] + 0.15, row


def test_labels_are_those_of_answers_and_their_end() -> None:
    """Position t has the token behind it as its target, and the end is one."""
    from tests.vlm.tasks import Sample

    sample = Sample(picture([("red", 3, 3, 9)])[None], ids("<image> color ?"), ids("red"))
    rows = batch_of([sample], tokens_per_image=2)
    assert rows.tokens.tolist() == [ids("<image> <image> color ? red")]
    assert rows.labels.tolist() == [[-100, -100, -100, *ids("red"), EOS]]

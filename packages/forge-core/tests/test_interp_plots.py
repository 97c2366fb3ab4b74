"""Attention as a picture: a square for each head, the text of each token, the weights as colours."""

import re

import pytest
import torch

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

from forge_core.interp import draw_attention
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

TEXTS = ["The", " model", "\n", "$a_b$"]


def weights(heads: int = 5) -> torch.Tensor:
    scores = torch.randn(heads, 4, 4, generator=torch.Generator().manual_seed(0))
    return scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf).softmax(-1)


def texts(path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_heads_and_tokens_are_named_as_they_are(tmp_path):
    out = tmp_path / "a.svg"
    draw_attention(weights(), out, labels=TEXTS, heads=[0, 4], title="layer 3")
    found = texts(out)
    assert {"head 0", "head 4", "layer 3", "attention weight"} <= {*found}
    assert "head 1" not in found
    for text in ("The", "·model", "\\n", "$a_b$"):
        assert found.count(text) >= 2, "beside the queries and below the keys"


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_same_weights_are_the_same_file_and_others_another(tmp_path):
    for name, value in (("a", weights()), ("b", weights()), ("c", weights().flip(0))):
        draw_attention(value, tmp_path / f"{name}.png")
    a, b, c = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    assert a.startswith(b"\x89PNG")


def test_long_rows_and_other_keys_are_drawn(tmp_path):
    long = torch.rand(1, 80, 80)
    draw_attention(long, tmp_path / "long.svg", labels=["word"] * 80)
    assert "word" not in texts(tmp_path / "long.svg"), "80 labels are too many"
    draw_attention(
        torch.rand(2, 4, 3), tmp_path / "x.svg", labels=TEXTS, key_labels=["cat", "dog", "owl"]
    )
    assert {"cat", "·model"} <= {*texts(tmp_path / "x.svg")}


def test_the_heads_of_a_plot_have_one_scale_of_colors(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: drawn.append(figure))
    values = torch.tensor([0.25, 1.0, 0.5])[:, None, None].expand(3, 2, 2)
    draw_attention(values, tmp_path / "a.png", heads=[0, 2])
    images = [image for square in drawn[0].axes for image in square.images]
    assert [image.get_array().max() for image in images] == [0.25, 0.5]
    assert [image.get_clim() for image in images] == [(0.0, 0.5)] * 2, (
        "heads 0 and 2 set the limits"
    )


def test_wrong_shapes_labels_and_names_are_rejected(tmp_path):
    with rejects("weights", (1, *weights().shape), "shape"):
        draw_attention(weights()[None], tmp_path / "a.png")
    with rejects("labels", 2, "length"):
        draw_attention(weights(), tmp_path / "a.png", labels=TEXTS[:2])
    with rejects("path", str(tmp_path / "a.gif"), "suffix", where="a.png"):
        draw_attention(weights(), tmp_path / "a.gif")

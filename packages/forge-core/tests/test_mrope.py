"""Rotary positions of three axes."""

from dataclasses import dataclass

import pytest
import torch

from forge_core import Transformer, TransformerConfig
from forge_core._shared.problems import raise_problems
from forge_core.model import MRopeConfig
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

SIZES = dict(vocab_size=32, dim=32, num_layers=2, num_heads=2, max_seq_len=16)


@dataclass(frozen=True)
class Config(TransformerConfig):
    mrope: MRopeConfig | None = None


@pytest.mark.parametrize(
    ("mrope", "axes"),
    [
        (MRopeConfig((4, 2, 2)), (0, 1, 2, 0, 1, 2, 0, 0)),
        (MRopeConfig((4, 2, 2), "chunked"), (0, 0, 0, 0, 1, 1, 2, 2)),
        (MRopeConfig((1, 3, 4), "chunked"), (0, 1, 1, 1, 2, 2, 2, 2)),
    ],
)
def test_each_pair_is_rotated_by_its_axis(mrope: MRopeConfig, axes: tuple[int, ...]) -> None:
    assert mrope.axes == axes
    positions = torch.randint(0, 99, (2, 3, 5))
    found = mrope.by_pair(positions)  # (B, S, D / 2)
    for pair, axis in enumerate(axes):
        assert torch.equal(found[:, :, pair], positions[:, axis])


@pytest.mark.parametrize("layout", ["chunked", "interleaved"])
def test_text_has_the_logits_of_one_axis(layout: str) -> None:
    tokens = torch.randint(0, 32, (2, 6))
    plain, mixed = (
        Transformer(TransformerConfig(**SIZES)),
        Transformer(Config(**SIZES, mrope=MRopeConfig((4, 2, 2), layout))),
    )
    wanted = plain(tokens)
    assert torch.equal(mixed(tokens), wanted)
    positions = torch.arange(6).expand(2, 3, 6)
    assert torch.equal(mixed(tokens, positions), wanted)
    for axis in range(3):
        other = positions.clone()
        other[:, axis] += torch.tensor([0, 0, 1, 1, 0, 2])
        assert not torch.allclose(mixed(tokens, other), wanted)


def test_impossible_arguments_are_rejected() -> None:
    with rejects("sections", [1, 3, 4], "interleaved"):
        MRopeConfig((1, 3, 4))
    with rejects("sections", [1, 3], "range"):
        MRopeConfig((1, 3))
    with rejects("layout", "x", "unknown"):
        MRopeConfig(layout="x")  # type: ignore[arg-type]
    for dims, mixer, key, code in (
        (32, "attention", "mrope.sections", "sum"),
        (128, "mla", "mrope", "mixer"),
    ):
        with rejects(key, code=code):
            raise_problems("model", MRopeConfig().problems(dims, mixer))
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    with rejects("positions", (2, 3, 6), "shape"):
        Transformer(TransformerConfig(**SIZES))(tokens, torch.zeros(2, 3, 6, dtype=torch.int64))

"""Sample text: what it costs, and where it ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core import SamplingConfig
from forge_train.report import text

pytestmark = pytest.mark.lane("test")


class Letters:
    eos_id = 0
    vocab_size = 2**20

    def encode(self, prompt: str) -> list[int]:
        return [ord(letter) for letter in prompt]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class HostReads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_F122_one_read_per_token_until_the_end_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(*args: object, eos_id: object = None, **options: object) -> Iterator[torch.Tensor]:
        assert eos_id is None  # generate_stream would read each token a second time for it
        return iter(torch.tensor([[104], [105], [0], [106]]))

    monkeypatch.setattr(text, "generate_stream", stream)
    with HostReads() as found:
        pieces = text.continuation(None, Letters(), "a", 9, SamplingConfig(), "cpu")  # type: ignore[arg-type]
        assert list(pieces) == ["h", "i"]
    assert found.count == 3

"""Sample text: what it costs, and where it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core import SamplingConfig
from forge_data import DataConfig, Tokenizer, TrainingSourceConfig, load_tokenizer
from forge_data.kinds import TextConfig
from forge_train.config.describe import ends_of_documents
from forge_train.report import text
from forge_train.trainer.choices import split_ids

pytestmark = pytest.mark.lane("test")


class Letters:
    eos_id, end_ids = 0, (0, 9)
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


@pytest.fixture
def begun(tmp_path: Path) -> Tokenizer:
    """A tokenizer whose post-processor writes <s> before a text, as Llama's."""
    library = pytest.importorskip("tokenizers")
    names = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", "a", "b"])}
    words = library.Tokenizer(library.models.WordLevel(names, unk_token="<unk>"))
    words.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<unk>", "<s>", "</s>"])
    words.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    words.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize(("prompt", "wanted"), [("a b", [1, 3, 4]), ("<s> a", [1, 3]), ("", [1])])
def test_F142_a_prompt_begins_with_the_first_token_once(
    begun: Tokenizer, prompt: str, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(text, "generate_stream", lambda model, ids, *a, **b: iter(seen.append(ids) or ()))  # fmt: skip
    monkeypatch.setattr(text, "generate", lambda model, ids, *a, **b: seen.append(ids) or torch.zeros(1, 0))  # fmt: skip
    list(text.continuation(None, begun, prompt, 1, SamplingConfig(), "cpu"))  # type: ignore[arg-type]
    list(text.continue_all(None, begun, [prompt], SamplingConfig(), 1, None, 1))  # type: ignore[arg-type]
    assert [torch.as_tensor(ids).tolist() for ids in seen] == [[wanted]] * 3


def test_F142_choices_are_scored_after_the_first_token(begun: Tokenizer) -> None:
    assert split_ids(begun, "a", " b") == ([1, 3, 4], 2)
    assert split_ids(begun, "<s> a", " b") == ([1, 3, 4], 2)
    assert split_ids(Letters(), "a", "b") == ([97, 98], 1)  # type: ignore[arg-type]


def test_F142_explain_names_begin_and_end_tokens_of_documents(
    begun: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("a b")
    table = {"tokenizer": str(begun.path)}
    sources = {
        name: TrainingSourceConfig("text", str(tmp_path / "a.txt"), weight=1.0, text=TextConfig(**table, **more))
        for name, more in {"a": {}, "b": {"bos": "none", "eos": "b"}}.items()
    }  # fmt: skip
    one, two = ends_of_documents(DataConfig(16, sources={**sources, "c": TrainingSourceConfig(weight=1.0)}))  # fmt: skip
    assert "sources.a" in one
    assert "begin with <s> (" in one
    assert "end with </s> (" in one
    assert "begin with no token (" in two
    assert "end with b (" in two

"""The shared topic `tokenizer_settings`, and each place that reads a tokenizer file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.lane("test")

TEXT = "low lower lowest newest widest" * 3


def plain() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["<unk>", "</s>", "<image>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=special, show_progress=False)  # fmt: skip
    made.train_from_iterator([TEXT] * 4, trainer)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of transformers whose tokenizer has all settings."""
    made = plain()
    made.model.dropout = 0.5
    made.enable_truncation(3)
    made.enable_padding(length=100)
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>",
              "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}  # fmt: skip  # prose: a template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def of_data(folder: Path) -> Callable[[], list[int]]:
    from forge_data import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    return lambda: tokenizer.encode(TEXT)


def of_a_batch(folder: Path) -> Callable[[], list[int]]:
    from forge_data.tokenizer import JsonTokenizer

    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    return lambda: tokenizer.encode_batch([TEXT])[0]


def of_chats(folder: Path) -> Callable[[], list[int]]:
    pytest.importorskip("transformers")
    from forge_data.chat.template import ChatTemplate
    from forge_data.kinds import ChatConfig

    template = ChatTemplate(ChatConfig(tokenizer=str(folder)))
    return lambda: list(template.tokenizer.encode(TEXT, add_special_tokens=False))


def of_images(folder: Path) -> Callable[[], list[int]]:
    from forge_vlm.data.templates import ChatSegment
    from forge_vlm.data.tokenizer import JsonTokens

    tokens = JsonTokens(folder, "</s>", "<image>")
    return lambda: tokens.encode([ChatSegment(TEXT)])[0].tolist()


@pytest.mark.parametrize("reader", [of_data, of_a_batch, of_chats, of_images])
def test_F151_a_file_with_dropout_gives_the_same_tokens_each_time(
    folder: Path, reader: Callable[[Path], Callable[[], list[int]]]
) -> None:
    encode, wanted = reader(folder), plain().encode(TEXT, add_special_tokens=False).ids
    assert [encode() for _ in range(5)] == [wanted] * 5

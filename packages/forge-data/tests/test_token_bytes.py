"""Bytes of ids: those of a text add up to its own, with every kind of tokenizer that keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge_data import ByteTokenizer, JsonTokenizer
from forge_data.token_bytes import byte_lengths

pytestmark = pytest.mark.lane("test")

TEXT = "So much straße, naïve 漢字 and 🙂:\n\tlow, lower, lowest widest newest"


def of_bytes(tokenizers: Any) -> Any:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    return library


def with_spaces(tokenizers: Any) -> Any:
    model = tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>")
    library = tokenizers.Tokenizer(model)
    library.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    library.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    return library


@pytest.mark.parametrize("kind", [of_bytes, with_spaces])
def test_the_bytes_of_ids_are_those_of_the_text(kind: Any, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    library = kind(tokenizers)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if kind is of_bytes else []
    special = ["<unk>", "<end>", *(f"<0x{i:02X}>" for i in range(256) if kind is with_spaces)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    library.train_from_iterator(["low lower lowest new newest wide widest " * 4], trainer)
    library.add_tokens(["much"])
    library.save(str(tmp_path / "t.json"))
    if kind is with_spaces:  # bytes are ordinary pieces of such a vocabulary
        table = json.loads((tmp_path / "t.json").read_text())
        kept = [t for t in table["added_tokens"] if not t["content"].startswith("<0x")]
        table["added_tokens"] = kept
        (tmp_path / "t.json").write_text(json.dumps(table))
    tokenizer = JsonTokenizer(tmp_path / "t.json", eos="<end>")
    lengths = byte_lengths(tokenizer)
    assert lengths is not None
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode())
    assert lengths[ids].sum() == len(TEXT.encode())
    assert lengths[tokenizer.eos_id] == 0


def test_bytes_are_one_each_and_the_end_of_a_document_none() -> None:
    lengths = byte_lengths(ByteTokenizer())
    assert lengths is not None
    assert lengths[ByteTokenizer().encode(TEXT)].sum() == len(TEXT.encode())
    assert lengths[256] == 0


def test_a_tokenizer_that_loses_text_has_no_bytes(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "w.json"))
    assert byte_lengths(JsonTokenizer(tmp_path / "w.json")) is None


def test_a_tokenizer_of_ones_own_may_say_its_bytes() -> None:
    class Own(ByteTokenizer):
        def byte_lengths(self) -> list[int]:
            return [2] * 257

    lengths = byte_lengths(Own())
    assert lengths is not None
    assert lengths.tolist() == [2] * 257

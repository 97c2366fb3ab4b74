"""Bytes of ids: those of a text add up to its own, with every kind of tokenizer that keeps them."""

from __future__ import annotations

import json
import unicodedata
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


def test_a_custom_tokenizer_may_give_its_bytes() -> None:
    class Own(ByteTokenizer):
        def byte_lengths(self) -> list[int]:
            return [2] * 257

    lengths = byte_lengths(Own())
    assert lengths is not None
    assert lengths.tolist() == [2] * 257


#: Parts of a tokenizer that change some text below, and parts that change none, by the names of the library.
LOSSY = {
    "NFKC": lambda t: ("normalizer", t.normalizers.NFKC()),
    "NFD": lambda t: ("normalizer", t.normalizers.NFD()),
    "lowercase": lambda t: ("normalizer", t.normalizers.Lowercase()),
    "strip": lambda t: ("normalizer", t.normalizers.Strip()),
    "replace": lambda t: ("normalizer", t.normalizers.Replace("\r\n", "\n")),
    "prepend": lambda t: ("normalizer", t.normalizers.Prepend("ab")),
    "in a sequence": lambda t: ("normalizer", t.normalizers.Sequence([t.normalizers.NFC(), t.normalizers.Lowercase()])),
    "whitespace": lambda t: ("pre", t.pre_tokenizers.WhitespaceSplit()),
    "words": lambda t: ("pre", t.pre_tokenizers.Whitespace()),
    "removed": lambda t: ("pre", t.pre_tokenizers.Split(" ", "removed")),
    "punctuation": lambda t: ("pre", t.pre_tokenizers.Punctuation("removed")),
    "delimiter": lambda t: ("pre", t.pre_tokenizers.CharDelimiterSplit(" ")),
    "scripts": lambda t: ("pre", t.pre_tokenizers.UnicodeScripts()),
    "metaspace": lambda t: ("pre", t.pre_tokenizers.Metaspace()),
    "left": lambda t: ("added", t.AddedToken("<tool>", lstrip=True)),
    "right": lambda t: ("added", t.AddedToken("<tool>", rstrip=True)),
}  # fmt: skip
KEPT = {
    "nothing": lambda t: ("normalizer", None),
    "bytes": lambda t: ("bytes", t.normalizers.ByteLevel()),
    "digits": lambda t: ("pre", t.pre_tokenizers.Digits(True)),
    "isolated": lambda t: ("pre", t.pre_tokenizers.Split(t.Regex(r"\p{N}{1,3}| +"), "isolated")),
    "merged": lambda t: ("pre", t.pre_tokenizers.Split(" ", "merged_with_next")),
    "punctuation": lambda t: ("pre", t.pre_tokenizers.Punctuation()),
    "added": lambda t: ("added", t.AddedToken("<tool>")),
}
TEXTS = (
    *("The quick brown fox.", "a \U0001f600\U0001f603 b", "a\tb  c\t", "a\r\nb\r\n", "\ufeffThe dog"),
    *("  The dog  ", "İstanbul", "The\u2581dog", "say <0x41> now 1234", "The  <tool>  fox", "ﬁne ½ ①"),
    *("cafe\u0301 nai\u0308ve", ""),
)  # fmt: skip


def byte_level(tokenizers: Any, kind: str = "", part: Any = None, alphabet: bool = True) -> Any:
    pre = [tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[: None if alphabet else -9]
    model = tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    library = tokenizers.Tokenizer(model)
    library.decoder = tokenizers.decoders.ByteLevel()
    if kind == "pre":
        pre.insert(0, part)
    if kind in ("normalizer", "bytes") and part is not None:
        library.normalizer = part
    if kind != "bytes":
        library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(pre)
    if kind == "added":
        library.add_tokens([part])
    return library


def lengths_of(library: Any, folder: Path) -> tuple[Any, JsonTokenizer]:
    library.save(str(folder / "t.json"))
    tokenizer = JsonTokenizer(folder / "t.json", eos="none")
    return byte_lengths(tokenizer), tokenizer


@pytest.mark.parametrize("name", LOSSY)
def test_F152_a_tokenizer_that_changes_text_has_no_bytes(name: str, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    lengths, tokenizer = lengths_of(byte_level(tokenizers, *LOSSY[name](tokenizers)), tmp_path)
    assert any(tokenizer.decode(tokenizer.encode(text)) != text for text in TEXTS)
    assert lengths is None


@pytest.mark.parametrize("name", KEPT)
def test_F152_bytes_are_those_of_the_text_where_no_part_changes_it(
    name: str, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    lengths, tokenizer = lengths_of(byte_level(tokenizers, *KEPT[name](tokenizers)), tmp_path)
    for text in TEXTS:
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_F152_nfc_counts_the_text_that_it_makes_and_an_added_space_counts(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    library = byte_level(tokenizers, "normalizer", tokenizers.normalizers.NFC())
    lengths, tokenizer = lengths_of(library, tmp_path)
    for text in TEXTS:
        written = unicodedata.normalize("NFC", text)
        assert lengths[tokenizer.encode(text)].sum() == len(written.encode())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    lengths, tokenizer = lengths_of(library, tmp_path)
    assert lengths[tokenizer.encode("The dog")].sum() == len(b" The dog")


def test_F152_models_that_drop_or_mark_parts_of_a_text_have_no_bytes(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    assert lengths_of(byte_level(tokenizers, alphabet=False), tmp_path)[0] is None
    for option in ({"end_of_word_suffix": "</w>"}, {"continuing_subword_prefix": "##"}):
        library = byte_level(tokenizers)
        letters = {k: v for k, v in library.get_vocab().items()}
        library.model = tokenizers.models.BPE(letters, [], **option)
        assert lengths_of(library, tmp_path)[0] is None
    for fallback in (True, False):
        library = with_spaces(tokenizers)
        names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", *"Thequickbrownfx."]
        vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
        library.model = tokenizers.models.BPE(vocab, [], byte_fallback=fallback, unk_token="<unk>")
        lengths, tokenizer = lengths_of(library, tmp_path)
        assert (lengths is not None) == fallback
        for text in TEXTS if fallback else ():  # a U+2581 of a text is read as a space
            assert lengths[tokenizer.encode(text)].sum() == len(
                text.replace("\u2581", " ").encode()
            )
        library.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.NFKC(), library.normalizer])  # fmt: skip
        assert lengths_of(library, tmp_path)[0] is None

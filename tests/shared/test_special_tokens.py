"""The shared topic `special_tokens`, against transformers, which reads the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
from forge_data._shared.special_tokens import Found, begin_tokens, end_tokens  # noqa: E402
from forge_testing.problems import rejects  # noqa: E402

pytestmark = pytest.mark.lane("test")

NAMES = ["<unk>", "<s>", "</s>", "<eos>", "a", "b"]
SPECIAL = ["<unk>", "<s>", "<eos>"]


def template(single: str) -> Any:
    used = [(name, NAMES.index(name)) for name in single.split() if name in NAMES]
    return tokenizers.processors.TemplateProcessing(single=single, special_tokens=used)


def processors() -> dict[str, Any]:
    made = tokenizers.processors
    return {
        "none": None,
        "bytes": made.ByteLevel(),
        "begin": template("<s> $A"),
        "both": template("<s> $A <eos>"),
        "two": template("<unk> <s> $A"),
        "bert": made.BertProcessing(("<eos>", 3), ("<s>", 1)),
        "roberta": made.RobertaProcessing(("<eos>", 3), ("<s>", 1)),
        "sequence": made.Sequence([template("<s> $A"), made.ByteLevel(), template("<unk> $A <eos>")]),
    }  # fmt: skip


def write(folder: Path, processor: Any, config: dict[str, Any], special: list[str] = SPECIAL) -> Any:  # fmt: skip
    words = tokenizers.models.WordLevel({name: i for i, name in enumerate(NAMES)}, "<unk>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(special)
    made.add_tokens([name for name in ("</s>",) if name not in special])  # Gemma has it for HTML
    if processor is not None:
        made.post_processor = processor
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return made


def names(found: Found) -> list[str]:
    return [name for _, name in found.tokens]


@pytest.mark.parametrize("name", processors())
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "GPT2TokenizerFast"])
@pytest.mark.parametrize("add", [None, False])
def test_F142_a_text_begins_as_transformers_begins_it(
    tmp_path: Path, name: str, kind: str, add: bool | None
) -> None:
    from transformers import AutoTokenizer

    config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "<eos>", "unk_token": "<unk>"}  # fmt: skip
    made = write(tmp_path, processors()[name], {**config, "add_bos_token": add})
    reference = AutoTokenizer.from_pretrained(str(tmp_path))
    ids = reference("a")["input_ids"]
    text = reference("a", add_special_tokens=False)["input_ids"]
    first = next(i for i in range(len(ids)) if ids[i : i + len(text)] == text)
    found = begin_tokens(made, tmp_path)
    assert [i for i, _ in found.tokens] == ids[:first]
    assert ("post-processor" in found.reason) == bool(first)
    assert end_tokens(made, tmp_path).tokens == [(reference.eos_token_id, "<eos>")]


def test_F142_add_bos_token_counts_where_the_post_processor_writes_nothing(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "<eos>", "add_bos_token": True}
    for name, begin in (("bytes", ["<s>"]), ("begin", ["<s>"]), ("two", ["<unk>", "<s>"])):
        assert names(begin_tokens(write(tmp_path, processors()[name], config), tmp_path)) == begin
    del config["bos_token"]
    assert names(begin_tokens(write(tmp_path, None, config), tmp_path)) == []


def test_F142_a_token_that_is_written_twice_is_there_once(tmp_path: Path) -> None:
    twice = template("<s> <s> $A <eos>")
    assert names(begin_tokens(write(tmp_path, twice, {}), tmp_path)) == ["<s>"]


@pytest.mark.parametrize(
    ("processor", "config", "token_map", "special", "wanted"),
    [
        ("none", {"eos_token": "b"}, None, SPECIAL, ["b"]),
        ("none", {"eos_token": {"__type": "AddedToken", "content": "b"}}, None, SPECIAL, ["b"]),
        ("none", {"eos_token": "b"}, {"eos_token": {"content": "<s>"}}, SPECIAL, ["<s>"]),
        ("none", {"eos_token": "b", "added_tokens_decoder": {}}, {"eos_token": "<s>"}, SPECIAL, ["b"]),
        ("both", {}, None, SPECIAL, ["<eos>"]),
        ("both", {"eos_token": None}, None, SPECIAL, ["<eos>"]),
        ("none", {}, None, SPECIAL, ["<eos>"]),
        ("none", {}, None, ["<unk>", "<eos>", "</s>"], ["</s>", "<eos>"]),
        ("none", {}, None, ["<unk>"], []),
    ],
)  # fmt: skip
def test_F143_the_end_is_what_the_files_name_then_a_usual_name_that_is_special(
    tmp_path: Path, processor: str, config: Any, token_map: Any, special: list[str], wanted: list[str]
) -> None:  # fmt: skip
    made = write(tmp_path, processors()[processor], config, special)
    if token_map is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(token_map))
    assert names(end_tokens(made, tmp_path)) == wanted
    if config.get("eos_token"):
        from transformers import AutoTokenizer

        reference = AutoTokenizer.from_pretrained(str(tmp_path), tokenizer_class="PreTrainedTokenizerFast")  # fmt: skip
        assert [reference.eos_token] == wanted
    assert end_tokens(made) == end_tokens(made, tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "key", "code"),
    [('{"eos_token": "<end>"}', "eos_token", "unknown"), ('{"bos_token": 3, "add_bos_token": true}', "bos_token", "unknown"), ("[]", "", "not_json"), ("{", "", "not_json")],
)  # fmt: skip
def test_files_that_name_no_token_of_the_vocabulary_are_rejected(
    tmp_path: Path, text: str, key: str, code: str
) -> None:
    made = write(tmp_path, None, {})
    (tmp_path / "tokenizer_config.json").write_text(text)
    with rejects(key, code=code):
        begin_tokens(made, tmp_path)
        end_tokens(made, tmp_path)

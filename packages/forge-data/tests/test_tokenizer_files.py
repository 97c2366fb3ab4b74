"""Files of tokenizers in folders of transformers: their end tokens, and whether they give the same ids."""

import json
from pathlib import Path

import pytest

from forge_data import InvalidData, JsonTokenizer, load_tokenizer
from forge_data.tokenizer_files import (
    TokenizerFiles,
    ends_beside,
    folder_ends,
    gives_same_ids,
    tokenizer_in,
)
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def test_the_ids_that_end_a_text_of_a_folder(tmp_path: Path) -> None:
    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
    assert folder_ends(tmp_path) == ()
    config.write_text(json.dumps({"text_config": {"eos_token_id": 2}}))
    assert folder_ends(tmp_path) == (2,)
    generation.write_text(json.dumps({"eos_token_id": [3, 2]}))
    assert folder_ends(tmp_path) == (3, 2)
    generation.write_text(json.dumps({"eos_token_id": "</s>"}))
    with rejects("eos_token_id", "</s>", "type", InvalidData, where=generation):
        folder_ends(tmp_path)
    generation.write_text("{")
    with rejects("", ..., "not_json", InvalidData, where=generation):
        folder_ends(tmp_path)


def test_a_file_that_was_written_again_gives_the_same_ids(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"], "dropout": None}
    one, other = tmp_path / "one.json", tmp_path / "tokenizer.json"
    one.write_text(json.dumps({"model": model}))
    other.write_text(json.dumps({"model": {**model, "merges": [["a", "b"]]}, "decoder": {}}))
    spec = {"name": "json", "path": str(one), "fingerprint": "another"}
    assert gives_same_ids(spec, other)
    assert not gives_same_ids({"name": "byte"}, other)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert ends_beside(spec, tmp_path) == (5,)
    other.write_text(json.dumps({"model": {**model, "vocab": {"b": 0}}}))
    assert not gives_same_ids(spec, other)
    assert ends_beside(spec, tmp_path) == ()
    other.write_text("[]")
    assert tokenizer_in(tmp_path) is None


def test_bytes_have_no_files(tmp_path: Path) -> None:
    found = TokenizerFiles(load_tokenizer("byte"))
    assert found.files() == {}
    assert found.note is not None
    assert found.ids(tmp_path) == {"eos_token_id": 256}


@pytest.mark.parametrize(("bos", "noted"), [(None, False), ("", True), ("<unk>", True)])
def test_F142_an_export_reports_a_tokenizer_that_begins_texts_otherwise(
    tmp_path: Path, bos: str | None, noted: bool
) -> None:
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(
        library.models.WordLevel({"<s>": 0, "<unk>": 1, "a": 2}, unk_token="<unk>")
    )
    made.add_special_tokens(["<s>", "<unk>"])
    made.post_processor = library.processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    spec = JsonTokenizer(tmp_path / "tokenizer.json", eos="", bos=bos).spec()
    assert (TokenizerFiles(load_tokenizer(spec)).note is not None) == noted

"""Text to ids and back."""

import json

import pytest

from forge_data import ByteTokenizer, InvalidData, JsonTokenizer, load_tokenizer
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def test_bytes_go_there_and_back():
    tokenizer = ByteTokenizer()
    text = "naïve café ☕\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < tokenizer.eos_id < tokenizer.vocab_size
    assert tokenizer.decode([104, 105, 256]) == "hi"
    assert tokenizer.decode([]) == ""


def test_broken_utf8_is_shown_not_raised():
    assert ByteTokenizer().decode([0xE2, 0x98, 104]) == "\ufffdh"


@pytest.mark.parametrize("bad", [257, -1])
def test_ids_outside_the_bytes_are_refused(bad):
    with rejects("ids", bad, "range"):
        ByteTokenizer().decode([1, bad])


def test_specs():
    assert load_tokenizer("byte").spec() == load_tokenizer(ByteTokenizer().spec()).spec()
    with rejects("tokenizer", {"name": "words"}, "unknown"):
        load_tokenizer({"name": "words"})
    with rejects("tokenizer", "byte", "mismatch", InvalidData):
        load_tokenizer({"name": "byte", "fingerprint": "byte-0"})
    with rejects("tokenizer", "nowhere.json", "not_found", InvalidData):
        load_tokenizer("nowhere.json")


def test_without_the_library_it_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "t.json").write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with rejects("tokenizer", str(tmp_path / "t.json"), "requires"):
        JsonTokenizer(tmp_path / "t.json")


def write_words(path, *words):
    """A whitespace tokenizer with the given words, in the library's JSON."""
    library = pytest.importorskip("tokenizers")
    tokenizer = library.Tokenizer(
        library.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return path


def test_json_tokenizer(tmp_path):
    tokenizer = JsonTokenizer(write_words(tmp_path / "t.json", "<unk>", "a", "b", "</s>"))
    assert tokenizer.encode("b a c") == [2, 1, 0]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (4, 3)
    assert load_tokenizer(json.loads(json.dumps(tokenizer.spec()))).encode("a") == [1]


def test_F50_an_end_token_with_id_0_is_an_end_token(tmp_path):
    path = write_words(tmp_path / "t.json", "<|endoftext|>", "<unk>", "a")
    assert JsonTokenizer(path).eos_id == 0
    assert JsonTokenizer(path, eos="a").eos_id == 2


def test_no_known_end_token_is_none_and_an_unknown_one_refused(tmp_path):
    path = write_words(tmp_path / "t.json", "<unk>", "a")
    assert JsonTokenizer(path).eos_id is None
    with rejects("eos", "<end>", "unknown"):
        JsonTokenizer(path, eos="<end>")


def test_another_file_under_the_same_name_is_refused(tmp_path):
    path = write_words(tmp_path / "t.json", "<unk>", "a")
    spec = JsonTokenizer(path).spec()
    write_words(path, "<unk>", "b")
    with rejects("tokenizer", str(path), "mismatch", InvalidData):
        load_tokenizer(spec)
    path.write_text("{}")
    with rejects("tokenizer", str(path), "damaged", InvalidData):
        JsonTokenizer(path)


def test_F127_settings_for_inputs_of_a_model_neither_cut_nor_fill_documents(tmp_path):
    library = pytest.importorskip("tokenizers")
    words = library.Tokenizer(library.models.WordLevel({"<pad>": 0, "a": 1, "b": 2}))
    words.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    words.enable_truncation(3)
    words.enable_padding(length=5)
    words.save(str(tmp_path / "t.json"))
    tokenizer = JsonTokenizer(tmp_path / "t.json")
    assert tokenizer.encode("a b a b a") == [1, 2, 1, 2, 1]
    assert tokenizer.encode_batch(["a b a b a", "b", ""]) == [[1, 2, 1, 2, 1], [2], []]


def test_special_tokens_of_a_template_are_not_added(tmp_path):
    library = pytest.importorskip("tokenizers")
    path = write_words(tmp_path / "t.json", "<unk>", "a", "b", "<s>", "</s>")
    words = library.Tokenizer.from_file(str(path))
    words.post_processor = library.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 4)]
    )
    words.save(str(path))
    assert words.encode("a b").ids == [3, 1, 2, 4]
    tokenizer = JsonTokenizer(path)
    assert tokenizer.encode("a b") == [1, 2]
    assert tokenizer.encode_batch(["a b", "b", ""]) == [[1, 2], [2], []]

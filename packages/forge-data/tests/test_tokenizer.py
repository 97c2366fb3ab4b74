"""Text to ids and back."""

import json

import pytest

from forge_data import ByteTokenizer, InvalidData, JsonTokenizer, load_tokenizer
from forge_data.prepare import prepare
from forge_data.tokenizer import describe_ends, document_tokenizer, encode_prompt, prompt_ids
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
def test_ids_outside_the_bytes_are_rejected(bad):
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


def test_without_the_library_the_error_names_what_to_install(tmp_path, monkeypatch):
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
    tokenizer.add_special_tokens([word for word in words if word.startswith("<")])
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


def test_a_missing_end_token_is_accepted_and_an_unknown_one_rejected(tmp_path):
    path = write_words(tmp_path / "t.json", "<unk>", "a")
    assert JsonTokenizer(path).eos_id is None
    with rejects("eos", "<end>", "unknown"):
        JsonTokenizer(path, eos="<end>")


def test_another_file_under_the_same_name_is_rejected(tmp_path):
    path = write_words(tmp_path / "t.json", "<unk>", "a")
    spec = JsonTokenizer(path).spec()
    write_words(path, "<unk>", "b")
    with rejects("tokenizer", str(path), "mismatch", InvalidData):
        load_tokenizer(spec)
    path.write_text("{}")
    with rejects("tokenizer", str(path), "damaged", InvalidData):
        JsonTokenizer(path)


def test_F127_settings_for_inputs_of_a_model_neither_truncate_nor_pad_documents(tmp_path):
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


def begun(path, *words):
    """A tokenizer of words whose post-processor writes <s> before a text."""
    library = pytest.importorskip("tokenizers")
    tokenizer = library.Tokenizer.from_file(str(write_words(path, "<unk>", "<s>", *words)))
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("a b", [1, 3, 4]), ("<s> a b", [1, 3, 4]), ("<s>", [1]), ("", [1]), ("a <s>", [1, 3, 1])],
)
def test_F142_a_prompt_begins_as_the_tokenizer_begins_a_text_and_only_once(tmp_path, text, wanted):
    tokenizer = JsonTokenizer(begun(tmp_path / "t.json", "</s>", "a", "b"))
    assert tokenizer.begin_ids == (1,)
    assert encode_prompt(tokenizer, text) == wanted
    assert encode_prompt(load_tokenizer(json.loads(json.dumps(tokenizer.spec()))), text) == wanted


def test_a_prompt_without_tokens_begins_with_the_end_token(tmp_path):
    assert prompt_ids(ByteTokenizer(), "") == [256]
    assert prompt_ids(ByteTokenizer(), "a") == [97]
    silent = JsonTokenizer(write_words(tmp_path / "t.json", "<unk>", "a"), eos="")
    with rejects("prompt", "", "empty"):
        prompt_ids(silent, "")


def test_F142_bos_names_the_first_token_or_none(tmp_path):
    path = begun(tmp_path / "t.json", "</s>", "a", "b")
    assert JsonTokenizer(path, bos="a").begin_ids == (3,)
    for tokenizer in (
        JsonTokenizer(path, bos=""),
        JsonTokenizer(path, bos="none"),
        ByteTokenizer(),
    ):
        assert tokenizer.begin_ids == ()
        assert "bos" not in tokenizer.spec()
        assert load_tokenizer(tokenizer.spec()).begin_ids == ()
    with rejects("bos", "<begin>", "unknown"):
        JsonTokenizer(path, bos="<begin>")


def test_F142_tokens_of_data_that_was_prepared_before_begin_with_none(tmp_path):
    path = begun(tmp_path / "t.json", "</s>", "a", "b")
    spec = {"name": "json", "path": str(path), "eos": "</s>"}
    assert load_tokenizer(spec).begin_ids == ()
    assert load_tokenizer({**spec, "eos": None}).eos_id is None
    assert load_tokenizer(str(path)).begin_ids == (1,)


def test_F142_and_F143_the_files_next_to_a_tokenizer_name_its_tokens(tmp_path):
    library = pytest.importorskip("tokenizers")
    words = library.Tokenizer.from_file(
        str(write_words(tmp_path / "tokenizer.json", "<s>", "<eos>", "a"))
    )
    words.add_tokens(["</s>"])  # as Gemma's, a tag of HTML
    words.save(str(tmp_path / "tokenizer.json"))
    words.save(str(tmp_path / "other.json"))
    config = {"bos_token": "<s>", "eos_token": "a", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    both = [JsonTokenizer(tmp_path / name) for name in ("tokenizer.json", "other.json")]
    assert [(t.begin_ids, t.eos) for t in both] == [((0,), "a"), ((), "<eos>")]
    described = describe_ends(both[0])
    assert all(word in described for word in ("<s>", "a", "add_bos_token", "eos_token"))


@pytest.mark.parametrize(
    ("words", "code"), [(["a", "b"], "missing"), (["</s>", "<eos>", "a"], "several")]
)
def test_F143_a_tokenizer_of_documents_has_one_end_or_eos_decides(tmp_path, words, code):
    path = str(write_words(tmp_path / "t.json", "<unk>", *words))
    assert load_tokenizer(path).eos_id is None  # a model's config.json may name its ends
    with rejects("eos", code=code):
        document_tokenizer(path)
    assert document_tokenizer(path, "a").eos == "a"
    assert document_tokenizer(path, "none").eos_id is None
    assert load_tokenizer(document_tokenizer(path, "none").spec()).eos_id is None


def test_F172_a_word_without_tokens_is_one_line(tmp_path):
    """The library raises bare Exception where the unknown token is not in the vocabulary."""
    path = str(write_words(tmp_path / "t.json", "a", "<end>"))
    tokenizer = JsonTokenizer(path, "<end>")
    assert tokenizer.encode("a a") == [0, 0]
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["a", text])):
        with rejects("tokenizer", path, "encode", InvalidData):
            encode("a b")
    (tmp_path / "in.txt").write_text("a b")
    with rejects("tokenizer", path, "encode", InvalidData):
        prepare(tmp_path / "in.txt", tmp_path / "out", tokenizer=path, eos="<end>")

"""Sets of the `datasets` library give the tokens that `prepare` gives for the same documents."""

import importlib.util
import itertools
import json
import re
import subprocess
import sys

import pytest

from forge_data import InvalidData, TokenFiles, open_header, open_source
from forge_data.config import SourceConfig
from forge_data.io import datasets_library
from forge_data.kinds import HuggingFaceConfig
from forge_data.prepare import prepare
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

ROWS = [f"document {i}, of words {'and words ' * (i % 7)}" for i in range(3000)]
ROWS[10:13] = ["", " \n ", "\ufeffmarked \u00e9\U0001f600"]


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The library, with its own cache and ours in a new folder."""
    library = pytest.importorskip("datasets")
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    library.disable_progress_bars()
    return library


@pytest.fixture
def prepared(tmp_path):
    """What token files of the same documents hold."""
    lines = [json.dumps({"text": text}) for text in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    prepare(tmp_path / "rows.jsonl", tmp_path / "prepared")
    return TokenFiles(tmp_path / "prepared")


def source_of(path, split="train", verify="touch", **table):
    table = HuggingFaceConfig(**table)
    return open_source(
        SourceConfig("huggingface", str(path), None, split, verify, huggingface=table)
    )


def assert_same(found, wanted):
    assert found.fingerprint() == wanted.fingerprint()
    assert (found.read(0, found.num_tokens) == wanted.read(0, wanted.num_tokens)).all()
    assert (found.documents == wanted.documents).all()
    assert found.tokenizer == wanted.tokenizer


def test_a_set_saved_to_disk(tmp_path, datasets, prepared, capsys):
    datasets.Dataset.from_dict({"text": ROWS}).save_to_disk(tmp_path / "set", num_shards=3)
    assert_same(source_of(tmp_path / "set"), prepared)
    assert "tokenizing" in capsys.readouterr().err
    assert_same(source_of(tmp_path / "set"), prepared)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("form", ["parquet", "json"])
def test_a_folder_of_data_files_with_splits(tmp_path, datasets, prepared, form):
    folder = tmp_path / "files"
    folder.mkdir()
    whole = datasets.Dataset.from_dict({"text": ROWS})
    getattr(whole, f"to_{form}")(folder / f"train.{form}")
    getattr(whole.select(range(5)), f"to_{form}")(folder / f"test.{form}")
    assert_same(source_of(folder), prepared)
    assert source_of_split(folder, "test").num_documents == 5
    assert source_of_split(folder, "train[:7]").num_documents == 7
    with rejects("path", str(folder), "not_loaded", InvalidData):
        source_of(folder, "validation")


def source_of_split(path, split):
    return open_source(
        SourceConfig("huggingface", str(path), huggingface=HuggingFaceConfig(split=split))
    )


def test_splits_and_columns_of_a_saved_set(tmp_path, datasets, prepared):
    whole = datasets.Dataset.from_dict({"body": ROWS, "id": list(range(3000))})
    datasets.DatasetDict(train=whole, validation=whole.select(range(10))).save_to_disk(
        tmp_path / "set"
    )
    assert_same(source_of(tmp_path / "set", text_field="body"), prepared)
    assert source_of(tmp_path / "set", "validation", text_field="body").num_documents == 10
    with rejects("split", "test", "unknown", InvalidData):
        source_of_split(tmp_path / "set", "test")
    with rejects("text_field", "text", "missing", InvalidData):
        source_of(tmp_path / "set")
    with rejects("text_field", "id", "type", InvalidData):
        source_of(tmp_path / "set", text_field="id")
    with rejects("huggingface.config_name", "other", "excludes", InvalidData):
        source_of(tmp_path / "set", config_name="other", text_field="body")
    whole.save_to_disk(tmp_path / "one")
    with rejects("split", "validation", "one_split", InvalidData):
        source_of(tmp_path / "one", "validation", text_field="body")


@pytest.mark.parametrize("streaming", [False, True])
def test_F134_columns_whose_content_would_be_lost_are_named(tmp_path, datasets, streaming):
    """A column without any value, which tables have, is none; others are counted by their rows."""
    rows = {"text": ["a", "b"], "id": [1, 2], "tools": [None, None]}
    whole = datasets.Dataset.from_dict(rows)
    whole.save_to_disk(tmp_path / "set")
    lost = whole.remove_columns("tools").add_column("images", [["a.png"], []])
    lost.save_to_disk(tmp_path / "lost")

    def opened(name, **options):
        config = HuggingFaceConfig(streaming=streaming, **options)
        return open_source(SourceConfig("huggingface", str(tmp_path / name), huggingface=config))

    found = opened("set")
    if not streaming:
        assert found.summary() == opened("set").summary()
        assert re.findall(r"\d|id", found.summary()) == ["2", "4", "id", "2"]
    with rejects("images", code="not_read", kind=InvalidData, where="lost"):
        opened("lost")
    opened("lost", ignore_keys=["images"])
    with rejects("id", code="strict", kind=InvalidData, where="set"):
        opened("set", strict=True)


def test_without_the_library_the_name_is_rejected(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with rejects("name", "huggingface", "requires"):
        open_source(SourceConfig("huggingface", "sets/web"))


def test_rows_that_are_chosen_or_shuffled_are_another_set(tmp_path, datasets):
    whole = datasets.Dataset.from_dict({"text": ["a", "b", "c"] * 9})
    found = []
    for name, rows in (
        ("one", whole),
        ("two", whole.shuffle(1)),
        ("three", whole.select(range(4))),
    ):
        rows.save_to_disk(tmp_path / name)
        found.append(source_of(tmp_path / name))
    assert len({source.path for source in found}) == 3
    assert len({source.fingerprint()["tokens"] for source in found}) == 3


def test_a_set_that_changed_is_another_entry(tmp_path, datasets):
    datasets.Dataset.from_dict({"text": ["one"] * 9}).save_to_disk(tmp_path / "set")
    first = source_of(tmp_path / "set")
    datasets.Dataset.from_dict({"text": ["two"] * 9}).save_to_disk(tmp_path / "set")
    second = source_of(tmp_path / "set")
    assert first.path != second.path
    assert first.fingerprint()["tokens"] != second.fingerprint()["tokens"]


@pytest.mark.parametrize("rows", [[], ["", "  "], [None, "x"]])
def test_rows_without_text(tmp_path, datasets, rows):
    features = datasets.Features({"text": datasets.Value("string")})
    datasets.Dataset.from_dict({"text": rows}, features=features).save_to_disk(tmp_path / "set")
    path = str(tmp_path / "set")
    problem = ("path", path, "empty") if rows else ("path", path, "not_loaded")
    problem = ("text", None, "null") if "x" in rows else problem
    with rejects(*problem, InvalidData, where=path) as error:
        source_of(tmp_path / "set")
    assert "\n" not in str(error.value)
    left = list((tmp_path / "cache").glob("tokens/*"))
    assert all(path.suffix == ".lock" for path in left)


@pytest.mark.parametrize("form", ["parquet", "state", "nowhere"])
def test_a_damaged_set_is_one_line(tmp_path, datasets, form):
    whole = datasets.Dataset.from_dict({"text": ROWS})
    path = tmp_path / "set"
    if form == "parquet":
        path.mkdir()
        whole.to_parquet(path / "a.parquet")
        file = path / "a.parquet"
    else:
        whole.save_to_disk(path)
        file = path / "state.json"
    file.write_bytes(file.read_bytes()[:500] if form == "parquet" else b"{")
    if form == "nowhere":
        path = tmp_path / "nowhere"
    with rejects("path", str(path), "not_loaded", InvalidData) as error:
        source_of(path)
    assert "\n" not in str(error.value)


def test_tokenized_by_a_json_tokenizer(tmp_path, datasets):
    library = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["<unk>", "</s>", *"abcdef"])}
    tokenizer = library.Tokenizer(library.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "words.json"))
    rows = ["a b c", "d", "", "e z f" * 100]
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(tmp_path / "set")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in rows))
    prepare(tmp_path / "rows.jsonl", tmp_path / "p", tokenizer=str(tmp_path / "words.json"))
    found = source_of(tmp_path / "set", tokenizer=str(tmp_path / "words.json"))
    wanted = TokenFiles(tmp_path / "p")
    assert found.fingerprint() == wanted.fingerprint()
    assert (found.read(0, found.num_tokens) == wanted.read(0, wanted.num_tokens)).all()
    (tmp_path / "words.json").write_text("{}")
    with rejects("tokenizer", str(tmp_path / "words.json"), "damaged", InvalidData):
        source_of(tmp_path / "set", tokenizer=str(tmp_path / "words.json"))


def test_documents_that_give_no_token_are_left_out(tmp_path, datasets):
    """Without a token that ends documents, and with a text that the tokenizer drops."""
    library = pytest.importorskip("tokenizers")
    model = library.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")
    tokenizer = library.Tokenizer(model)
    tokenizer.normalizer = library.normalizers.Replace("~", "")
    tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    datasets.Dataset.from_dict({"text": ["a a", "~", "~", "a"]}).save_to_disk(tmp_path / "set")
    options = {"tokenizer": str(tmp_path / "words.json"), "eos": "none"}
    found = source_of(tmp_path / "set", **options)
    assert (found.num_tokens, found.documents.tolist()) == (3, [0, 2])
    datasets.Dataset.from_dict({"text": ["~"]}).save_to_disk(tmp_path / "nothing")
    with rejects("path", str(tmp_path / "nothing"), "empty", InvalidData):
        source_of(tmp_path / "nothing", **options)


def test_a_header_reads_no_row(tmp_path):
    pytest.importorskip("datasets")
    header = open_header(SourceConfig("huggingface", str(tmp_path / "nowhere")))
    assert (header.vocab_size, header.max_token_id, header.num_tokens) == (257, 256, None)
    assert header.tokenizer["name"] == "byte"


@pytest.mark.slow
def test_without_the_library_one_line_names_the_extra():
    """In an interpreter that cannot import it, and in which token files work."""
    program = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("datasets", "pyarrow", "tokenizers", "transformers"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
from forge_data import SourceConfig, open_header, open_source
print(open_source(SourceConfig()).num_documents)
for function in (open_source, open_header):
    try:
        function(SourceConfig("huggingface", "sets/web"))
    except ValueError as error:
        problem = error.problems[0]
        print(problem.key, problem.value, problem.code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, *said = done.stdout.splitlines()
    assert said == ["name huggingface requires"] * 2


#: Names of folders, and of neighbors that a pattern of that name would read.
PATTERNS = {"data[v2]": "datav", "[!x]": "y", "a*b": "aXXb"}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "neighbor"), PATTERNS.items())
def test_F149_a_folder_of_the_name_of_a_pattern_is_read_and_no_neighbor(
    tmp_path, datasets, name, neighbor, streaming, monkeypatch
):
    for folder, text in ((name, "right"), (neighbor, "wrong")):
        below = tmp_path / folder / "json"  # also the name of a builder of the library
        below.mkdir(parents=True)
        (below / "train-[1].jsonl").write_text(json.dumps({"text": text}) + "\n")
        (below / "test.jsonl").write_text(json.dumps({"text": "held out"}) + "\n")
    monkeypatch.chdir(tmp_path / name)
    for path in (tmp_path / name, "json"):  # a parent, and the current folder
        assert texts_of(path, streaming) == ["right"]


def test_F149_a_folder_of_the_name_of_a_variable_is_read_or_an_error(
    tmp_path, datasets, monkeypatch
):
    """The library replaces `$V` where it reads files of a folder, but not where it streams them."""
    monkeypatch.setenv("V", "w")
    for folder, text in (("$V", "right"), ("w", "wrong")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert texts_of(tmp_path / "$V", streaming=True) == ["right"]
    with rejects("path", str(tmp_path / "$V"), "variable", InvalidData):
        source_of(tmp_path / "$V")


def texts_of(path, streaming):
    """Texts of a source, by the bytes of its tokens; eager or by its pieces."""
    source = source_of(path, streaming=streaming)
    if streaming:
        return [text for i in range(len(source.pieces)) for text in source.pieces.texts(i, 0)]
    ids = source.read(0, source.num_tokens)
    bounds = [*source.documents, source.num_tokens]
    return [bytes(ids[a : b - 1].tolist()).decode() for a, b in itertools.pairwise(bounds)]


def test_F149_saved_sets_of_names_that_the_library_expands(tmp_path, datasets, monkeypatch):
    for name in ("~x", "s", "s::t"):
        datasets.Dataset.from_dict({"text": [f"in {name}"]}).save_to_disk(tmp_path / "new")
        (tmp_path / "new").rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert texts_of("~x", streaming=False) == ["in ~x"]
    with rejects("path", str(tmp_path / "s::t"), "chain", InvalidData):
        source_of("s::t")


LATER = {
    "another column": {"text": "b", "more": 1},
    "a column less": {"text": "b"},
    "text for a number": {"text": "b", "id": "x", "meta": {"k": 1}},
    "an object for text": {"text": "b", "id": 1, "meta": "words"},
}


@pytest.mark.parametrize("streaming", [False, True])
def test_F171_other_columns_of_json_lines_may_have_any_shape(tmp_path, datasets, streaming):
    for i, later in enumerate(LATER.values()):
        folder = tmp_path / f"set{i}"
        folder.mkdir()
        first = {"text": "a", "id": 1, "meta": {"k": 1}}
        (folder / "a.jsonl").write_text(json.dumps(first) + "\n")
        (folder / "b.jsonl").write_text(json.dumps(later) + "\n")
        assert texts_of(folder, streaming) == ["a", "b"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("row", "code"),
    [({"body": "x"}, "missing"), ({"text": 3}, "type"), ({"text": {"k": "x"}}, "type")],
)
def test_F171_a_file_whose_text_has_another_shape_is_named(
    tmp_path, datasets, streaming, row, code
):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "a", "body": "b"}\n')
    (tmp_path / "in/b.jsonl").write_text(json.dumps(row) + "\n")
    with rejects("text_field", "text", code, InvalidData, where=tmp_path / "in/b.jsonl"):
        texts_of(tmp_path / "in", streaming)


def test_F171_another_column_of_the_same_set_is_not_taken_from_the_cache_of_the_first(
    tmp_path, datasets
):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "a", "body": "b"}\n')
    for field, wanted in (("text", "a"), ("body", "b")):
        source = source_of(tmp_path / "in", text_field=field)
        assert bytes(source.read(0, 1).tolist()).decode() == wanted
    columns = datasets.load_dataset(str(tmp_path / "in"), split="train").column_names
    assert columns == ["text", "body"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_set_of_the_hub_is_announced_before_it_is_fetched(
    tmp_path, datasets, monkeypatch, capsys, streaming
):
    """Once, by the first process of a machine; never for a folder, and never where the hub is not asked."""
    lines = []

    def fetch(name, *_, **__):
        lines.append(capsys.readouterr().err)
        raise FileNotFoundError(name)

    def lines_of(path):
        lines.clear()
        with pytest.raises(InvalidData):
            source_of(path, streaming=streaming)
        return "".join(lines).splitlines()

    datasets_library._announce.cache_clear()
    monkeypatch.setattr(datasets, "load_dataset_builder", fetch)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert lines_of("ada/texts") == []
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    (line,) = lines_of("ada/texts")
    for word in ("'ada/texts'", datasets.config.HF_ENDPOINT, "HF_HUB_OFFLINE=1"):
        assert word in line
    assert (str(tmp_path / "hf") in line) is not streaming  # the cache
    assert lines_of("ada/texts") == []
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert lines_of("ada/others") == []
    monkeypatch.delenv("LOCAL_RANK")
    (tmp_path / "folder").mkdir()
    assert lines_of(tmp_path / "folder") == []

"""What every kind of source must keep: token 0 may end documents, long documents go on, no id is over what was said."""

import json
import sys
from itertools import pairwise

import numpy as np
import pytest

from forge_data import (
    DataConfig,
    InvalidData,
    PackedStream,
    SourceConfig,
    TrainingSourceConfig,
    open_header,
    open_source,
    open_training,
)
from forge_data.kinds import BorderConfig, HuggingFaceConfig, TextConfig
from forge_data.packing_config import PACKINGS
from forge_data.packing_plan import plan_rows
from forge_data.prepare import prepare
from forge_testing.problems import ANY, rejects

pytestmark = pytest.mark.lane("test")

WORDS = ["<|endoftext|>", "<unk>", *"abcdefg"]
TEXTS = ["a b c", "d", "e f g a " * 9, "b"]
DOCUMENTS = [[WORDS.index(word) for word in text.split()] + [0] for text in TEXTS]
IDS = [i for document in DOCUMENTS for i in document]
BEGUN = [i for document in DOCUMENTS for i in [0, *document[:-1]]]  # 0 begins each


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A tokenizer whose token 0 ends documents."""
    library = pytest.importorskip("tokenizers")
    model = library.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>")
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(WORDS[:2])
    tokenizer.save(str(tmp_path / "words.json"))
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    return str(tmp_path / "words.json")


def write_lines(folder):
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder / "a.jsonl"


def tokens(folder, words):
    prepare(write_lines(folder), folder / "tokens", tokenizer=words)
    return SourceConfig("tokens", str(folder / "tokens"))


def text(folder, words):
    return SourceConfig("text", str(write_lines(folder)), text=TextConfig(tokenizer=words))


def hugging_face(folder, words, **options):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "set")
    table = HuggingFaceConfig(tokenizer=words, **options)
    return TrainingSourceConfig("huggingface", str(folder / "set"), huggingface=table)


def nanogpt(folder, words):
    (folder / "train.bin").write_bytes(np.array(IDS, "<u2").tobytes())
    path = str(folder / "train.bin")
    return SourceConfig("nanogpt", path, nanogpt=BorderConfig(eos_id=0))


def llm_c(folder, words):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(BEGUN)
    (folder / "train.bin").write_bytes(header.tobytes() + np.array(BEGUN, "<u2").tobytes())
    path = str(folder / "train.bin")
    return SourceConfig("nanogpt", path, nanogpt=BorderConfig(bos_id=0))


def npy(folder, words):
    np.save(folder / "a.npy", np.array(IDS, "<i4"))
    return SourceConfig("npy", str(folder / "a.npy"), npy=BorderConfig(eos_id=0))


KINDS = [tokens, text, hugging_face, nanogpt, llm_c, npy]


@pytest.mark.parametrize("kind", KINDS)
def test_F50_token_0_divides_documents_of_every_kind(tmp_path, words, kind):
    source = open_source(kind(tmp_path, words))
    ends = [*source.documents.tolist(), source.num_tokens]
    found = [source.read(a, b).tolist() for a, b in pairwise(ends)]
    wanted = DOCUMENTS if kind is not llm_c else [[0, *ids[:-1]] for ids in DOCUMENTS]
    assert found == wanted


def test_F50_token_0_ends_documents_of_a_streamed_set(tmp_path, words):
    config = hugging_face(tmp_path, words, streaming=True, virtual_shards=1, shuffle_window=4)
    stream = open_training(DataConfig(64, sources={"a": config}), seed=0)
    row = {name: value[0] for name, value in stream.arrays(np.array([0])).items()}
    found = [
        row["tokens"][row["document_ids"] == i].tolist()
        for i in range(row["document_ids"].max() + 1)
    ]
    assert sorted(found) == sorted(DOCUMENTS)


def documents_of(kind, folder, words):
    """The documents of a source, in any order."""
    config = kind(folder, words)
    if config.name == "huggingface" and config.huggingface.streaming:
        stream = open_training(DataConfig(128, sources={"a": config}), seed=0)
        row = {name: value[0] for name, value in stream.arrays(np.array([0])).items()}
        count = row["document_ids"].max() + 1
        found = [row["tokens"][row["document_ids"] == i].tolist() for i in range(count)]
    else:
        source = open_source(config)
        ends = [*source.documents.tolist(), source.num_tokens]
        found = [source.read(a, b).tolist() for a, b in pairwise(ends)]
    return sorted(found)


def streamed(folder, words):
    return hugging_face(folder, words, streaming=True, virtual_shards=1, shuffle_window=8)


@pytest.mark.parametrize("kind", [tokens, text, hugging_face, streamed])
def test_F142_documents_of_text_have_the_tokenizers_first_and_last_token_once(
    tmp_path, words, kind, monkeypatch
):
    """Also where the text spells the tokens, and as they did before where the tokenizer writes none."""
    library = pytest.importorskip("tokenizers")
    monkeypatch.setattr(sys.modules[__name__], "TEXTS", [*TEXTS, "<unk> c <|endoftext|>"])
    without = documents_of(kind, tmp_path, words)
    changed = library.Tokenizer.from_file(words)
    changed.post_processor = library.processors.TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", 1)]
    )
    changed.save(words)
    (folder := tmp_path / "begun").mkdir()
    spelled = [1, WORDS.index("c"), 0]
    assert without == sorted([*DOCUMENTS, spelled])
    assert documents_of(kind, folder, words) == sorted([*([1, *ids] for ids in DOCUMENTS), spelled])


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_F48_every_packing_goes_on_with_documents_longer_than_a_row(tmp_path, words, kind, packing):
    """Of every kind: the 37 tokens of one document are in rows of 8, in their order."""
    source, seq_len = open_source(kind(tmp_path, words)), 8
    lengths = np.diff(source.documents, append=source.num_tokens)
    plan = None if packing == "concatenate" else plan_rows(lengths, seq_len, packing)
    stream = PackedStream(source, seq_len, seed=1, plan=plan)
    arrays = stream.arrays(np.arange(len(stream)))
    kept = arrays["document_ids"] >= 0
    assert sorted(arrays["tokens"][kept].tolist()) == sorted(IDS)
    long = max(DOCUMENTS, key=len) if kind is not llm_c else [0, *max(DOCUMENTS, key=len)[:-1]]
    pairs = {(a, b) for a, b in pairwise(long)}
    labels = arrays["labels"]
    learnt = set(zip(arrays["tokens"][labels >= 0].tolist(), labels[labels >= 0].tolist()))
    assert pairs <= learnt


@pytest.mark.parametrize("kind", [*KINDS, lambda *a: hugging_face(*a, streaming=True)])
def test_F49_every_kind_gives_its_largest_id_before_a_row_is_read(tmp_path, words, kind):
    """At least what its rows hold: a run compares it with the model's vocabulary before anything starts."""
    header = open_header(kind(tmp_path, words))
    assert max(IDS) <= header.max_token_id <= len(WORDS) - 1


@pytest.mark.parametrize("kind", [nanogpt, llm_c, npy, tokens, text])
def test_F49_an_id_that_appears_later_never_leaves_a_source(tmp_path, words, kind):
    source = open_source(kind(tmp_path, words))
    assert source.max_token_id == max(IDS)
    path = getattr(source, "path", tmp_path / "train.bin")
    path = {npy: tmp_path / "a.npy"}.get(kind, path)
    path = path / "tokens.bin" if path.is_dir() else path
    with path.open("r+b") as file:
        file.seek(-1 if path.name == "tokens.bin" else -2, 2)
        file.write(b"\xff")
    problem = ("block", 0, "damaged") if path.name == "tokens.bin" else ("", ANY, "changed")
    with rejects(*problem, InvalidData, where=path.name):
        source.read(0, source.num_tokens)

"""Runs that read text and sets of `datasets` without a step before: equal to runs on prepared token files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from forge_data import TokenFiles, open_source
from forge_data.prepare import prepare
from forge_testing import forge_train, kill_after_step, runs, start
from forge_testing.jobs import write_job
from forge_testing.problems import rejects
from forge_train import DataError, load_job

TEXTS = [f"{i} bottles hang on the wall, {'and one falls ' * (i % 5)}" for i in range(400)]
QUIET = {"metrics.console": "off", "sample.max_new_tokens": 0}
SOURCE = {
    "text": 'name = "text"\npath = "{0}/notes"\ntext = {{validation_every = 9, cache = "{0}/cache"}}\n',
    "huggingface": 'name = "huggingface"\npath = "{0}/set"\nhuggingface = {{cache = "{0}/cache"}}\n',
    "tokens": 'name = "tokens"\npath = "{0}/prepared"\n',
}


def write_texts(folder: Path, texts: list[str]) -> None:
    """The texts as JSONL in a folder, as a set with splits, and as prepared token files."""
    (folder / "notes").mkdir(exist_ok=True)
    held_out = [i % 9 == 8 for i in range(len(texts))]
    for name, some in (("a", texts[:250]), ("b", texts[250:])):
        lines = [json.dumps({"text": text}) for text in some]
        (folder / f"notes/{name}.jsonl").write_text("\n".join(lines))
    datasets = pytest.importorskip("datasets")
    splits = {
        name: datasets.Dataset.from_dict(
            {"text": [t for t, h in zip(texts, held_out) if h == held]}
        )
        for name, held in (("train", False), ("validation", True))
    }
    datasets.DatasetDict(splits).save_to_disk(folder / "set")
    prepare(folder / "notes", folder / "prepared", validation_every=9, overwrite=True)


def job_of(folder: Path, data: Path, kind: str) -> Path:
    job = runs.make_job(folder)
    source = SOURCE[kind].format(data)
    job.write_text(job.read_text().replace('name = "builtin"\n', source))
    return job


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("data")
    write_texts(folder, TEXTS)
    return folder


@pytest.fixture(scope="module")
def wanted(data: Path) -> Path:
    """The run on prepared token files, never disturbed."""
    job = job_of(data / "wanted", data, "tokens")
    runs.fit_alone(job, **QUIET)
    return job


@pytest.fixture(params=["text", "huggingface"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def job(tmp_path: Path, data: Path, kind: str) -> Path:
    return job_of(tmp_path, data, kind)


@pytest.mark.slow
def test_killed_and_resumed_it_equals_the_run_on_token_files(
    tmp_path: Path, data: Path, wanted: Path, job: Path, kind: str
) -> None:
    flags = ["--checkpoint.wait", "true", "--sample.max_new_tokens", "0"]
    kill_after_step(start("run", job, *flags), tmp_path / "run/metrics.jsonl", 5)
    done = forge_train("run", job, *flags)
    assert done.code == 0, done.err
    runs.assert_same_bits(
        runs.saved_tensors(tmp_path / "run"), runs.saved_tensors(wanted.parent / "run")
    )
    assert runs.columns(job)["val_loss"] == runs.columns(wanted)["val_loss"]
    if kind == "text":  # and the other way round: the identity of a run is its tokens
        again = job_of(tmp_path, data, "tokens")
        assert forge_train("run", again, *flags, "--train.steps", "13").code == 0


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_with_an_empty_cache_write_it_once(
    tmp_path: Path, data: Path, wanted: Path, job: Path, kind: str
) -> None:
    job.write_text(job.read_text().replace(f"{data}/cache", f"{tmp_path}/cache"))
    runs.fit_on_ranks(3, job, **{k.replace(".", "__"): v for k, v in QUIET.items()})
    runs.assert_same_rows(runs.columns(job), runs.columns(wanted))
    entries = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(entries) == (
        1 if kind == "text" else 2
    )  # both splits are in one, or each in its own


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_moved_it_goes_on_and_changed_it_is_rejected(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("datasets")
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    write_texts(here, TEXTS)
    runs.fit_alone(job_of(tmp_path, here, kind), **{**QUIET, "train.steps": 3})
    shutil.copytree(here, there, ignore=shutil.ignore_patterns("cache"))  # other paths and times
    shutil.rmtree(here)
    job = job_of(tmp_path, there, kind)
    assert runs.fit_alone(job, **{**QUIET, "train.steps": 5}).step == 5
    changed = ["another text", *TEXTS[1:]]
    write_texts(there, changed)
    with rejects("fingerprint", code="mismatch", kind=DataError, where="source.tokens: "):
        runs.fit_alone(job, **{**QUIET, "train.steps": 7})


@pytest.mark.slow
def test_explain_and_plan_tokenize_nothing(tmp_path: Path, data: Path) -> None:
    for kind in ("text", "huggingface"):
        job = job_of(tmp_path / kind, data, kind)
        job.write_text(job.read_text().replace(f"{data}/cache", f"{tmp_path}/cache"))
        done = forge_train("explain", job)
        assert done.code == 0, done.err
        assert "data.sources.text: " in done.out
        assert forge_train("plan", job, "--gpus", "2").code == 0
        assert not (tmp_path / "cache").exists()
    job = job_of(tmp_path / "text", data, "text")
    runs.fit_alone(job, **{**QUIET, "train.steps": 1})
    known = TokenFiles(data / "prepared")
    lines = forge_train("explain", job).out.splitlines()
    (line,) = [line for line in lines if line.startswith("data.sources.text:")]
    assert {f"{known.num_documents:,}", f"{known.num_tokens:,}"} <= {*line.split()}


def job_with(folder: Path, source: str) -> Path:
    job = write_job(folder, "")
    job.write_text(job.read_text().replace('name = "builtin"\n', source))
    return job


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ('name = "text"\npath = "{0}/nowhere"\n', r"data\.sources\.text\.path '.*nowhere' "),
        ('name = "huggingface"\npath = "{0}/set"\nhuggingface = {{text_field = "b"}}\n', r"data\.sources\.text\.text_field 'b' "),
        ('name = "huggingface"\npath = "{0}/set/train"\nhuggingface = {{cache = "{0}/none"}}\n', r"data\.validation\.split 'validation' .*eval\.every_steps = 0"),
        ('name = "text"\npath = "{0}/prepared/train/tokens.json"\n', r"data\.validation\.path '.*tokens.json' "),
        ('name = "text"\npath = "{0}/notes"\ntext = {{tokenizer = "{0}/none"}}\n', r"data\.sources\.text\.tokenizer '.*none' "),
    ],
)  # fmt: skip
def test_sources_that_cannot_be_read_are_rejected_before_a_run_begins(
    tmp_path: Path, data: Path, source: str, sentence: str
) -> None:
    job = job_with(tmp_path, source.format(data))
    done = forge_train("run", job)
    assert done.code == 65
    assert re.search(sentence, done.err), done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "run").exists()
    assert "tokenizing" not in done.err


@pytest.mark.slow
def test_errors_of_files_of_ids_name_what_is_missing(tmp_path: Path) -> None:
    source = f'name = "nanogpt"\npath = "{tmp_path}"\nnanogpt = {{eos_id = 9}}\n'
    for name in ("train", "val"):
        (tmp_path / f"{name}.bin").write_bytes(bytes([1, 0, 2, 0]) * 500)
    job = job_with(tmp_path, source)
    done = forge_train("run", job)
    assert done.code == 78
    assert "model.vocab_size " in done.err
    flags = ["--model.vocab_size", "10", "--sample.max_new_tokens", "0"]
    for command in (["run", job], ["explain", job, "--data.packing.name", "best_fit"]):
        done = forge_train(*command, *flags)
        assert (done.code, done.out) == (65, "")
        assert "data.sources.text.nanogpt.eos_id 9 " in done.err
        assert "train.bin" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.lane("test")
def test_F142_F143_a_job_sets_no_token_by_an_empty_name(tmp_path: Path) -> None:
    """ "none" is how jobs, and config.toml of runs, write that a key is not given."""
    library = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3}
    made = library.Tokenizer(library.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = library.processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("a a a a\n" * 9)
    job = job_of(tmp_path / "text", tmp_path, "text")
    table = "data.sources.text.text"
    given = {**QUIET, f"{table}.tokenizer": str(tmp_path / "tokenizer.json"), f"{table}.document": "line",
             f"{table}.validation_every": 0, "model.vocab_size": 8, "eval.every_steps": 0}  # fmt: skip

    def tokens(**more: str) -> int:
        loaded = load_job(
            job, {**given, **{f"{table}.{key}": value for key, value in more.items()}}
        )
        return open_source(loaded.config.data.sources["text"]).num_tokens

    assert [tokens(), tokens(bos="none", eos="none")] == [54, 54]
    assert [tokens(bos=""), tokens(eos=""), tokens(bos="", eos="")] == [45, 45, 36]

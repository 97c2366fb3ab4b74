"""What keys of several sections, files on the disk and arguments of a command may not be together."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forge_data.prepare import prepare
from forge_parallel import ParallelConfig, StartError
from forge_testing import write_job
from forge_testing.problems import assert_problem, rejects
from forge_train import ConfigError, DataError, StateError, cli, jobs, load_job, load_model, process
from forge_train._shared.limits import limit_problem
from forge_train.cli import run_verb
from forge_train.config.init import InitConfig, find_source, source_problems, tokenizer_problems
from forge_train.errors import JobError

pytestmark = pytest.mark.lane("test")

MOMA = {
    **{"model.name": "vlm", "model.modalities.image.first_id": 256, "model.vocab_size": 260},
    **{"model.fusion.name": "moma", "model.fusion.moma.router": "expert_choice"},
    "sample.max_new_tokens": 0,
}
PHASE = {"data.phases.late.start_tokens": 256}
ASKED = "eval.exact_match.path"
Settings = dict[str, Any]

#: Settings, the key at fault, its value, code.
RULES: list[tuple[Settings, str, Any, str]] = [
    ({"model.max_seq_len": 16}, "data.seq_len", 32, "above_limit"),
    (
        {**PHASE, "data.phases.late.seq_len": 64, "model.max_seq_len": 32},
        *("data.phases.late.seq_len", 64, "above_limit"),
    ),
    (
        {**PHASE, "data.phases.late.global_batch": 3, "train.micro_batch": 2},
        *("data.phases.late.global_batch", 3, "divides"),
    ),
    (
        {"model.mtp.num_modules": 1, "train.objective": "a:b"},
        *("model.mtp.num_modules", 1, "excludes"),
    ),
    (
        {
            **{"model.mtp.num_modules": 1, "parallel.pp": 2},
            "parallel.pp_schedule": "interleaved_zero_bubble",
        },
        *("parallel.pp_schedule", "interleaved_zero_bubble", "ahead"),
    ),
    (
        {"parallel.param_dtype": "bf16", "optimizer.name": "sgd", "parallel.precision": "bf16"},
        *("parallel.param_dtype", "bf16", "optimizer"),
    ),
    (
        {"parallel.param_dtype": "bf16", "lora.rank": 2, "parallel.precision": "bf16"},
        *("parallel.param_dtype", "bf16", "adapters"),
    ),
    (
        {"eval.every_steps": 0, "data.validation.split": "validation"},
        *("data.validation", ..., "never_read"),
    ),
    (
        {"eval.every_steps": 0, "checkpoint.best": "val_loss"},
        *("checkpoint.best", "val_loss", "requires"),
    ),
    (
        {"eval.every_steps": 0, "eval.sets.more.split": "train"},
        *("eval.sets.more", ..., "never_read"),
    ),
    ({"eval.every_steps": 0, "eval.at_start": True}, "eval.at_start", ..., "never_read"),
    ({"resilience.rollback.max_rollbacks": 7}, "resilience.rollback", ..., "requires"),
    (MOMA, "model.fusion.moma.router", "expert_choice", "evaluation"),
    (
        {**MOMA, "sample.max_new_tokens": 8},
        *("model.fusion.moma.router", "expert_choice", "generation"),
    ),
    (
        {"model.moe.num_experts": 2, "model.moe.router": "expert_choice"},
        *("model.moe.router", "expert_choice", "generation"),
    ),
    (
        {"model.moe.num_experts": 2, "model.moe.router": "uniform"},
        *("model.moe.router", "uniform", "generation"),
    ),
    (
        {"model.attention.mask": "forge_testing.extensions:self_only"},
        *("model.attention.mask", "forge_testing.extensions:self_only", "generation"),
    ),
    (
        {"model.moe.num_experts": 2, "model.moe.router": "nowhere"},
        *("model.moe.router", "nowhere", "unknown"),
    ),
    ({ASKED: "a"}, ASKED, "a", "model"),
    ({**MOMA, ASKED: "a", "eval.every_steps": 0}, ASKED, "a", "never_read"),
    ({**MOMA, ASKED: "a"}, ASKED, "a", "requires"),
    (
        {**MOMA, ASKED: "a", "eval.exact_match.source": "text"},
        *("eval.exact_match.source", "text", "unknown"),
    ),
    (
        {"model.name": "forge_testing.models:bigram", "model.args.wrong": 3},
        *("model.args", {"wrong": 3}, "call"),
    ),
]


@pytest.mark.parametrize(("settings", "key", "value", "code"), RULES)
def test_a_rule_of_several_sections_names_key_and_value(
    tmp_path: Path, settings: Settings, key: str, value: Any, code: str
) -> None:
    with rejects(key, value, code, ConfigError):
        load_job(write_job(tmp_path), settings, with_data=False)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with rejects("checkpoint.digest", "blake3", "requires", ConfigError):
        load_job(write_job(tmp_path), {"checkpoint.digest": "blake3"}, with_data=False)


def test_a_value_of_the_file_has_the_file_as_its_origin(tmp_path: Path) -> None:
    job = write_job(tmp_path, "[lora]\nrank = -1\n")
    for settings, origin in (({}, str(job)), ({"lora.rank": -2}, "flag")):
        with rejects("lora.rank", settings.get("lora.rank", -1), "range", ConfigError) as caught:
            load_job(job, settings)
        assert caught.value.problems[0].origin == origin


def test_weights_fix_the_keys_of_their_model(tmp_path: Path) -> None:
    job, table = write_job(tmp_path), tmp_path / "run/model.toml"
    table.parent.mkdir()
    table.write_text('[model]\nname = "transformer"\ndim = 16\nnum_heads = 2\n')
    load_job(job, with_data=False)
    with rejects("model.dim", 32, "weights", ConfigError) as caught:
        load_job(job, {"model.dim": 32, "model.num_heads": 4}, with_data=False)
    assert [p.key for p in caught.value.problems] == ["model.dim", "model.num_heads"]
    with rejects("model.name", "a:b", "weights", ConfigError) as caught:
        load_job(job, {"model.name": "a:b"}, with_data=False)
    assert len(caught.value.problems) == 1  # another model has other keys
    table.write_text("[model")
    with rejects("", ..., "not_toml", ConfigError, where=table):
        load_job(job, with_data=False)


# ---- data


def nanogpt(path: Path, ids: Sequence[int] = range(2000)) -> Settings:
    """Keys of ids without a vocabulary and a tokenizer."""
    np.array(ids, dtype=np.uint16).tofile(path)
    return {"data.sources.text.name": "nanogpt", "data.sources.text.path": str(path)}


@pytest.mark.parametrize(
    ("settings", "key", "value", "code"),
    [
        ({"model.vocab_size": 99}, "data.sources.text", 1999, "token_id"),
        ({"model.vocab_size": 2000}, "sample.max_new_tokens", 8, "requires"),
    ],
)
def test_ids_fit_the_model_and_the_sample(
    tmp_path: Path, settings: Settings, key: str, value: Any, code: str
) -> None:
    with rejects(key, value, code, DataError):
        load_job(write_job(tmp_path), {**nanogpt(tmp_path / "a.bin"), **settings})


def test_ids_without_a_vocabulary_need_one(tmp_path: Path) -> None:
    with rejects("model.vocab_size", ..., "vocabulary", ConfigError):
        load_job(write_job(tmp_path), nanogpt(tmp_path / "a.bin"))


def test_the_sample_is_within_the_length_of_the_model(tmp_path: Path) -> None:
    with rejects("sample.max_new_tokens", 31, "above_limit", DataError):
        load_job(write_job(tmp_path), {"model.max_seq_len": 32, "sample.max_new_tokens": 31})


def test_validation_is_not_training_data(tmp_path: Path) -> None:
    with rejects("data.validation", ..., "same_data", DataError):
        load_job(write_job(tmp_path), {"data.validation.split": "train"})


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(table: Any, **_: Any) -> None:
        raise PermissionError(13, "no", "a.bin")

    monkeypatch.setattr("forge_data.run_checks.open_header", fail)
    with rejects("data.sources.text", "a.bin", "not_found", DataError):
        load_job(write_job(tmp_path), {"model.vocab_size": 9})


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data made by the tokenizer words.json in it."""
    library, folder = pytest.importorskip("tokenizers"), tmp_path_factory.mktemp("words")
    model = library.models.WordLevel({"<|endoftext|>": 0, "<unk>": 1, "the": 2}, unk_token="<unk>")
    made = library.Tokenizer(model)
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(folder / "words.json"))
    (folder / "text.txt").write_text("the\n" * 99)
    prepare(folder / "text.txt", folder / "tokens", tokenizer=str(folder / "words.json"))
    return folder


def test_all_sources_have_one_tokenizer(tmp_path: Path, words: Path) -> None:
    own = {"name": "tokens", "path": str(words / "tokens"), "split": "train"}
    settings = {"model.vocab_size": 300, "sample.max_new_tokens": 0}
    for table, code in (("data.sources.more", "tokenizer"), ("eval.sets.more", "tokenizer_of_set")):
        keys = {f"{table}.{key}": value for key, value in own.items()}
        with rejects(table, ..., code, DataError):
            load_job(write_job(tmp_path), {**settings, **keys})


def test_data_have_the_tokenizer_of_the_weights(tmp_path: Path, words: Path) -> None:
    (tmp_path / "config.json").touch()
    shutil.copy(words / "words.json", tmp_path / "tokenizer.json")
    init, key = InitConfig(from_=str(tmp_path)), "data.sources.a"
    spec = {"name": "json", "path": str(words / "words.json")}
    assert not tokenizer_problems(key, spec, init, tmp_path / "run")
    found = tokenizer_problems(key, {"name": "byte"}, init, tmp_path / "run")
    assert_problem(DataError(found), key, "bytes", "weights")


# ---- folders of runs


def test_the_source_of_a_run_is_a_run_a_checkpoint_or_a_folder(tmp_path: Path) -> None:
    none, empty, run = (str(tmp_path / name) for name in ("none", "empty", "run"))
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    step = tmp_path / "run/checkpoints/step-00000002"
    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    assert find_source(f"{run}@2") == find_source(run)
    wanted = {none: "not_found", f"{none}@4": "not_found", str(tmp_path): "unknown"}
    for name, code in {**wanted, empty: "empty", f"{run}@3": "step"}.items():
        with rejects("init.from", name, code):
            find_source(name)
        assert [p.code for p in source_problems(name, tmp_path / "new")] == [code]
    assert_problem(ConfigError(source_problems(run, Path(run))), "run.dir", run, "parent")
    assert not source_problems("none", Path(run))  # it has begun


def test_the_model_of_a_folder_that_is_not_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with rejects("run_dir", str(run), "not_found", ConfigError):
        load_model(run)
    (run / "model.toml").touch()
    with rejects("run_dir", str(run), "untrained", ConfigError):
        load_model(run)
    (run / "model.toml").unlink()
    (run / "config.toml").write_text(load_job(write_job(tmp_path)).to_toml())
    (run / "checkpoints").mkdir()
    with rejects("run_dir", str(run / "checkpoints"), "empty", StateError):
        load_model(run)
    with rejects("step", 3, "unknown", StateError):
        load_model(run, step=3)
    store = SimpleNamespace(steps=lambda: [2, 3], load=lambda *_, **__: 2)
    monkeypatch.setattr(jobs, "Store", lambda *_, **__: contextlib.nullcontext(store))
    with rejects("step", 3, "damaged", StateError):
        load_model(run, step=3)


def test_a_folder_has_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "read_model", lambda path: SimpleNamespace(path=path))
    with rejects("folder", str(tmp_path), "tokenizer", ConfigError):
        jobs.load_folder(tmp_path)


# ---- the command line


@pytest.mark.parametrize(
    ("args", "key", "value", "code"),
    [
        (["rnu"], "VERB", "rnu", "unknown"),
        (["keys", "modle."], "PREFIX", "modle.", "unknown"),
        (["run"], "CONFIG", ..., "missing"),
        (["study", "swep"], "study", "swep", "unknown"),
        (["run", "--train.steps", "3", "--train.steps=4"], "--train.steps", ..., "duplicate"),
        (["run", "--nproc", "x"], "--nproc", "x", "range"),
        (["run", "--nproc=0"], "--nproc", "0", "range"),
        (["report"], "RUNS", [], "length"),
        (["report", "a", "--texd"], "--texd", ..., "flag"),
        (["goodput", "a", "b"], "", ..., "flag"),
        (["generate"], "", ..., "flag"),
    ],
)
def test_arguments_of_a_command(args: list[str], key: str, value: Any, code: str) -> None:
    with rejects(key, value, code, ConfigError):
        run_verb(args)


def test_a_flag_that_the_parser_rejects_is_printed_as_the_parser_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["explain", str(write_job(tmp_path)), "--plott", "3"]
    with rejects("--plott", ..., "flag", ConfigError) as caught:
        run_verb(args)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
    assert cli._dispatch(args) == 78
    assert capsys.readouterr().err == caught.value.printed
    assert caught.value.lines == caught.value.printed.splitlines()


def test_ranks_are_not_started_by_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with rejects("--nproc", "2", "launcher", ConfigError):
        run_verb(["run", "--nproc", "2"])


def test_ranks_that_cannot_meet_are_an_error_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(config: Any, facts: Any) -> None:
        raise StartError("a\nb")

    monkeypatch.setattr("forge_parallel.launch", launch)
    with pytest.raises(JobError) as caught, process.init_ranks(ParallelConfig()):
        raise AssertionError("they met")
    assert caught.value.lines == ["a", "b"]


def test_F165_a_limit_of_open_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(table: Any, **_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("forge_data.run_checks.open_header", full)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with pytest.raises(OSError, match=f"Errno {errno.EMFILE}") as caught:  # no fault of the data
        load_job(write_job(tmp_path))
    problem = limit_problem(caught.value)
    assert problem is not None
    assert (problem.key, problem.value) == ("RLIMIT_NOFILE", limit)

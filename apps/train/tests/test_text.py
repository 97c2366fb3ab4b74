"""Sample text: what it costs, and where it ends."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_data import DataConfig, TextConfig, Tokenizer, TrainingSourceConfig, load_tokenizer
from forge_data.choices import split_ids
from forge_data.describe import ends_of_documents
from forge_data.tokenizer import encode_prompt, prompt_ids
from forge_testing.problems import rejects
from forge_train import ConfigError, Trainer, load_job
from forge_train.build.begin_tokens import began_texts_without, begin_problems, begin_texts_without
from forge_train.build.data import run_tokenizer
from forge_train.build.run_directory import RunDirectory
from forge_train.config.layers import Layers
from forge_train.jobs import _build

pytestmark = pytest.mark.lane("test")


class Letters:
    eos_id, end_ids = 0, (0, 9)
    vocab_size = 2**20

    def encode(self, prompt: str) -> list[int]:
        return [ord(letter) for letter in prompt]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.fixture
def begun(tmp_path: Path) -> Tokenizer:
    """A tokenizer whose post-processor writes <s> before a text, as Llama's."""
    library = pytest.importorskip("tokenizers")
    names = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", "a", "b"])}
    words = library.Tokenizer(library.models.WordLevel(names, unk_token="<unk>"))
    words.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<unk>", "<s>", "</s>"])
    words.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    words.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize(("prompt", "wanted"), [("a b", [1, 3, 4]), ("<s> a", [1, 3]), ("", [1])])
def test_F142_a_prompt_begins_with_the_first_token_once(
    begun: Tokenizer, prompt: str, wanted: list[int]
) -> None:
    assert prompt_ids(begun, prompt) == wanted


def test_F142_choices_are_scored_after_the_first_token(begun: Tokenizer) -> None:
    assert split_ids(begun, "a", " b") == ([1, 3, 4], 2)
    assert split_ids(begun, "<s> a", " b") == ([1, 3, 4], 2)
    assert split_ids(Letters(), "a", "b") == ([97, 98], 1)  # type: ignore[arg-type]


def test_F142_explain_names_begin_and_end_tokens_of_documents(
    begun: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("a b")
    table = {"tokenizer": str(begun.path)}
    sources = {
        name: TrainingSourceConfig("text", str(tmp_path / "a.txt"), weight=1.0, text=TextConfig(**table, **more))
        for name, more in {"a": {}, "b": {"bos": "none", "eos": "b"}}.items()
    }  # fmt: skip
    one, two = ends_of_documents(DataConfig(16, sources={**sources, "c": TrainingSourceConfig(weight=1.0)}))  # fmt: skip
    assert "sources.a" in one
    assert "begin with <s> (" in one
    assert "end with </s> (" in one
    assert "begin with no token (" in two
    assert "end with b (" in two


def job_of_texts(folder: Path) -> Path:
    (folder / "texts").mkdir()
    for name in ("train", "validation"):
        (folder / "texts" / name).mkdir()
        (folder / "texts" / name / "a.txt").write_text("a b " * 40)
    source = f"""name = "text"
path = "{folder}/texts"
"""
    text = f'tokenizer = "{folder}/tokenizer.json"\neos = "</s>"\n'
    path = folder / "job.toml"
    path.write_text(
        f"""[run]
dir = "{folder}/run"
[model]
dim = 8
num_layers = 1
num_heads = 1
[data]
seq_len = 8
num_workers = 0
[data.sources.mine]
{source}[data.sources.mine.text]
{text}[eval.sets.more]
{source}split = "validation"
[eval.sets.more.text]
{text}[train]
steps = 1
global_batch = 1
"""
    )
    return path


def begins(config: Any) -> list[str | None]:
    tables = [config.data.sources["mine"], config.data.validation, config.eval.sets["more"]]
    return [table.text.bos for table in tables]


@pytest.mark.parametrize("older", [True, False])
def test_F142_a_run_of_before_goes_on_without_the_first_token(
    begun: Any, older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config.toml has no bos: prompts and held-out texts begin as its data did, and a resume names the fix."""
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    job, run = load_job(job_of_texts(tmp_path)), RunDirectory(tmp_path / "run")
    lines = job.to_toml().splitlines()
    kept = [line for line in lines if not (older and line.startswith("bos ="))]
    run.create()
    run.config.write_text("\n".join(kept))
    step = run.checkpoint(1)
    step.mkdir(parents=True)
    (step / "manifest.json").touch()

    # the tokens that a prompt of the run begins with
    _, config, _ = _build(run, kernels=True)
    assert encode_prompt(run_tokenizer(config), "a b") == ([3, 4] if older else [1, 3, 4])
    assert begins(config) == ([""] * 3 if older else [None] * 3)

    # a resume
    if not older:
        assert not begin_problems(job, run)
        return
    for name in (names := ["data.sources.mine", "eval.sets.more"]):
        with rejects(f"{name}.text.bos", ..., "older", kind=ConfigError) as caught:
            Trainer(job)
        assert 'bos = ""' in str(caught.value)
    assert not (tmp_path / "cache").exists()  # nothing was tokenized before
    again = load_job(tmp_path / "job.toml", {f"{name}.text.bos": "" for name in names})
    assert not begin_problems(again, run)
    assert begins(again.config) == [""] * 3  # validation is derived from the source
    accepted = load_job(tmp_path / "job.toml", {"data.accept_change": True})
    assert not begin_problems(accepted, run)


@pytest.mark.parametrize(("tokenizer", "prepared"), [("tokenizer.json", False), ("tokenizer.json", True), ("byte", False)])  # fmt: skip
def test_F142_conversations_with_images_of_before_go_on_without_the_first_token(
    begun: Any, tokenizer: str, prepared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prepared folder keeps its own, and bytes have none."""
    pytest.importorskip("PIL")
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "talks").mkdir()
    (tmp_path / "talks/a.jsonl").write_text(json.dumps({"messages": talk}))
    if prepared:
        (tmp_path / "talks/prepared.json").touch()
    path = tokenizer if tokenizer == "byte" else str(tmp_path / tokenizer)
    options = {"tokenizer": path, "template": "plain", "image": "<unk>", "tokens_per_tile": 1}
    options |= {"resolution": {"fixed": {"size": 8}}}
    file = str(tmp_path / "talks" / ("" if prepared else "a.jsonl"))
    table = {"name": "vlm", "path": file, "options": options, "text": {"eos": "none"}}
    layers = Layers()
    layers.add({"data": {"sources": {"talks": table}}}, "config.toml")

    follows = tokenizer != "byte" and not prepared
    assert began_texts_without(layers)
    begin_texts_without(layers)
    assert layers.at("data.sources.talks.options.bos") == ("" if follows else None)

    run = RunDirectory(tmp_path / "run")
    run.checkpoint(1).mkdir(parents=True)
    (run.checkpoint(1) / "manifest.json").touch()
    run.config.write_text('[data.sources.talks]\nname = "vlm"\n[data.sources.talks.text]\neos = "none"\n')  # fmt: skip

    def found(**more: str) -> list[str]:
        source = TrainingSourceConfig("vlm", file, options={**options, **more})
        data = SimpleNamespace(accept_change=False, sources={"talks": source}, validation=None)
        config = SimpleNamespace(data=data, eval=SimpleNamespace(every_steps=1, sets={}))
        job: Any = SimpleNamespace(config=config, origin=lambda key: "default")
        return [problem.key for problem in begin_problems(job, run)]

    assert found() == (["data.sources.talks.options.bos"] if follows else [])
    assert found(bos="") == []

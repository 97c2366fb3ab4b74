"""`forge-train generate` from a Hugging Face folder, and from a file of prompts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_core import SamplingConfig
from forge_core.generate import generate_text
from forge_data import SourceConfig
from forge_data.kinds import TextConfig
from forge_data.tokenizer import prompt_ids
from forge_lab.text import continue_all, read_prompts, stream_text
from forge_testing.problems import rejects
from forge_train import ConfigError, load_folder
from forge_train.toolkit import run_tokenizer

pytestmark = pytest.mark.lane("test")

TEXTS = ["one two", "three", "two two three one"]


def folder(path: Path) -> Path:
    """A tiny random Llama of transformers with a tokenizer of words; its end token is 3."""
    transformers, library = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = ["[UNK]", "one", "two", "three", *(f"word{i}" for i in range(36))]
    tokenizer = library.Tokenizer(
        library.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, initializer_range=0.3,
        bos_token_id=None, eos_token_id=[3, 7], pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_a_folder_writes_what_transformers_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = folder(tmp_path / "hf")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    wanted = theirs.generate(torch.tensor([[1, 2]]), max_new_tokens=12, do_sample=False)
    words = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    names = {i: word for word, i in words.items()}
    ids = [i for i in wanted[0, 2:].tolist() if i not in (3, 7)]
    assert stream_text(path, prompt="one two", max_new_tokens=12, temperature=0.0) == 0
    shown = capsys.readouterr()
    assert shown.out.split() == ["one", "two" + names[ids[0]], *(names[i] for i in ids[1:])]
    assert f"\n{path}, " in f"\n{shown.err}"


@pytest.mark.lane("quick")
def test_texts_of_a_file_do_not_depend_on_how_many_run_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = folder(tmp_path / "hf")
    model, tokenizer = load_folder(path)
    assert tokenizer.eos_id == 3
    sampling = SamplingConfig(temperature=1.2, min_p=0.01, repetition_penalty=1.1, seed=5)
    found = [
        list(continue_all(model, tokenizer, TEXTS, sampling, 15, 2, rows)) for rows in (1, 2, 9)
    ]
    assert found[0] == found[1] == found[2]
    assert len({*found[0]}) == 3
    (tmp_path / "prompts.txt").write_text("\n".join([*TEXTS, ""]))
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": t}) + "\n" for t in TEXTS)
    )
    for name in ("prompts.txt", "prompts.jsonl"):
        stream_text(
            path, prompts=tmp_path / name, batch_size=2, max_new_tokens=15, temperature=1.2, min_p=0.01,
            repetition_penalty=1.1, prefill_chunk=2, seed=5,
        )  # fmt: skip
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert rows == [{"prompt": p, "text": t} for p, t in zip(TEXTS, found[0], strict=True)]


def test_without_a_number_texts_are_as_long_as_the_model_has_room_for(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = folder(tmp_path / "hf")
    stream_text(path, prompt="one two", temperature=0.0)
    shown = capsys.readouterr()
    assert numbers(shown.err) == [62, 64, 2]
    stream_text(path, prompt="one two", temperature=0.0, max_new_tokens=62)
    asked = capsys.readouterr()
    assert asked.out == shown.out
    assert numbers(asked.err) == []
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    stream_text(path, prompts=tmp_path / "prompts.txt", temperature=0.0)
    assert numbers(capsys.readouterr().err) == [60, 64, 4]
    with rejects("tokens", (1, 64), "length", ConfigError):
        stream_text(path, prompt="one " * 64)
    assert numbers(capsys.readouterr().err) == []


def numbers(text: str) -> list[int]:
    """Of the line about the room that is left for new tokens."""
    line = next((line for line in text.splitlines() if "max_seq_len" in line), "")
    return [int(digits) for digits in re.findall(r"\d+", line)]


def test_prompts_that_cannot_be_continued_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = folder(tmp_path / "hf")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "one"}\n{"text": "two"}\n')
    with rejects("prompt", None, "type", where="broken.jsonl, line 2"):
        read_prompts(tmp_path / "broken.jsonl")
    (tmp_path / "torn.jsonl").write_text('{"prompt": ')
    with rejects("", ..., "not_json", where="torn.jsonl, line 1"):
        read_prompts(tmp_path / "torn.jsonl")
    with rejects("--prompt", ..., "excludes", ConfigError):
        stream_text(path, prompt="one", prompts=path / "config.json")
    with rejects("--image", ..., "excludes", ConfigError):
        stream_text(path, image=(path,), prompts=path / "config.json")
    with rejects("--prefill_chunk", 8, "images", ConfigError):
        stream_text(path, image=(path,), prefill_chunk=8)
    with rejects("--batch_size", 0, "range", ConfigError):
        stream_text(path, image=(path,), batch_size=0)
    with rejects("source", str(path), "images", ConfigError):
        stream_text(path, image=(path,))
    (tmp_path / "import").mkdir()
    (tmp_path / "import/model.toml").touch()
    with rejects("run_dir", str(tmp_path / "import"), "untrained", ConfigError):
        stream_text(tmp_path / "import")
    none = tmp_path / "none.txt"
    with rejects("--prompts", str(none), "read", ConfigError):
        stream_text(path, prompts=none)
    with rejects("max_new_tokens", 99, "length", ConfigError, where="62"):
        stream_text(path, prompt="one two", max_new_tokens=99)
    (tmp_path / "long.txt").write_text("one\n" + "two " * 60)
    with rejects("max_new_tokens", 9, "length", ConfigError, where="60"):
        stream_text(path, prompts=tmp_path / "long.txt", batch_size=1, max_new_tokens=9)
    with rejects("--batch_size", 0, "range", ConfigError):
        stream_text(path, prompts=tmp_path / "long.txt", batch_size=0, max_new_tokens=1)
    assert capsys.readouterr().out == ""  # not even the prompt
    (path / "tokenizer.json").unlink()
    with rejects("folder", str(path), "tokenizer", ConfigError):
        load_folder(path)


def test_F144_each_end_of_a_folder_ends_a_text_as_in_transformers(tmp_path: Path) -> None:
    """Of generation_config.json, otherwise of config.json; in a run that began from the folder, too."""
    path = folder(tmp_path / "hf")
    transformers = pytest.importorskip("transformers")
    vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    names = {i: word for word, i in vocabulary.items()}
    greedy = SamplingConfig(temperature=0.0)
    (tmp_path / "text.txt").write_text("one two")
    shutil.copytree(path, tmp_path / "run/hf")
    text = SourceConfig("text", str(tmp_path / "text.txt"), text=TextConfig(str(path / "tokenizer.json"), "none"))  # fmt: skip
    data, place = SimpleNamespace(sources={"text": text}), SimpleNamespace(dir=tmp_path / "run")
    config: Any = SimpleNamespace(data=data, run=place, init=SimpleNamespace(from_=None))

    def set_ends(configured: Any, generated: Any) -> None:
        for folder in (path, tmp_path / "run/hf"):
            table = json.loads((path / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**table, "eos_token_id": configured}))
            (folder / "generation_config.json").unlink(missing_ok=True)
            if generated is not None:
                table = {"eos_token_id": generated}
                (folder / "generation_config.json").write_text(json.dumps(table))

    def theirs() -> list[int]:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        found = model.generate(torch.tensor([[1, 2]]), max_new_tokens=9, do_sample=False)
        return list(found[0, 2:].tolist())

    set_ends(None, None)
    free = theirs()
    end = next(token for token in reversed(free) if free.index(token) > 1)
    other = next(token for token in range(40) if token not in free)
    for configured, generated in (
        *(([other, end], [other, end]), (other, [other, end]), (other, end), (None, end)),
        *(([other, end], None), (end, None)),
    ):
        set_ends(configured, generated)
        wanted = [names[token] for token in theirs() if token != end]
        assert len(wanted) == free.index(end)
        model, tokenizer = load_folder(path)
        for each in (tokenizer, run_tokenizer(config)):
            pieces = generate_text(model, each, prompt_ids(each, "one two"), 9, greedy)
            assert "".join(pieces).split() == wanted
            (shown,) = continue_all(model, each, ["one two"], greedy, 9, None, 1)
            assert shown.split() == wanted
    set_ends("</s>", None)
    with rejects("eos_token_id", "</s>", "type", ConfigError, where="config.json"):
        run_tokenizer(config)

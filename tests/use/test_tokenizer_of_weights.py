"""Weights of a folder of Hugging Face and data of another tokenizer: refused, or accepted by a key and exported so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_data.prepare import prepare
from forge_testing import write_job
from forge_testing.problems import rejects
from forge_train import ConfigError, DataError, Trainer, load_job
from forge_train.hf.exporting import export_run
from forge_train.hf.importing import import_folder

pytestmark = pytest.mark.lane("test")

WORDS = ["<|endoftext|>", "<unk>", "the", "cat", "sat", "on", "mat"]
KEYS = {
    **{"metrics.console": "off", "sample.max_new_tokens": 0, "eval.every_steps": 0},
    **{"train.steps": 1, "model.vocab_size": 300},
}


def tokens_of(folder: Path, words: list[str]) -> dict[str, Any]:
    """The keys of data whose tokenizer has these words, in this order."""
    library = pytest.importorskip("tokenizers")
    folder.mkdir()
    model = library.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([word for word in words if word.startswith("<")])
    tokenizer.save(str(folder / "words.json"))
    (folder / "text.txt").write_text("the cat sat on mat\n" * 50)
    made = str(folder / "words.json")
    end = WORDS[0]
    prepare(folder / "text.txt", folder / "tokens", tokenizer=made, eos=end, document="line")
    return {"data.sources.text.name": "tokens", "data.sources.text.path": str(folder / "tokens")}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A folder that holds hf/, whose tokenizer has WORDS; the keys of data of the same, and of another tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    data = tokens_of(root / "same", WORDS)
    Trainer(load_job(write_job(root), {**KEYS, **data})).fit()
    export_run(root / "run", root / "hf")
    return root, data, tokens_of(root / "other", [*WORDS[:2], *reversed(WORDS[2:])])


def build(folder: Path, data: dict[str, Any], **more: Any) -> Trainer:
    folder.mkdir(parents=True, exist_ok=True)
    flat = {key.replace("__", "."): value for key, value in more.items()}
    return Trainer(load_job(write_job(folder), {**KEYS, **data, **flat}))


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_other_tokenizers_are_rejected_and_the_same_one_is_not(tmp_path: Path, places: Any) -> None:
    root, same, other = places
    hf = {"init__from": str(root / "hf")}
    for data, made in ((other, str(root / "other/tokens/tokenizer.json")), ({}, "bytes")):
        with rejects("data.sources.text", made, "weights", DataError):
            build(tmp_path, data, **hf)
        build(tmp_path, data, **hf, init__other_tokenizer=True)
        build(tmp_path, data, init__from=str(root / "run"))  # of no folder of Hugging Face
    assert not (tmp_path / "run").exists()
    again = shutil.copytree(root / "hf", tmp_path / "again")
    table = json.loads((again / "tokenizer.json").read_text())
    table = {**table, "version": "2.0", "padding": None, "model": {**table["model"], "x": None}}
    (again / "tokenizer.json").write_text(json.dumps(table, indent=1))
    build(tmp_path, same, init__from=str(again))
    (again / "tokenizer.json").write_text("{}")  # nothing to compare
    build(tmp_path, other, init__from=str(again))


def test_an_import_and_a_fork_of_it_keep_the_rule(tmp_path: Path, places: Any) -> None:
    root, same, other = places
    import_folder(root / "hf", tmp_path / "a/run")
    refused = ("data.sources.text", f"{root / 'other/tokens/tokenizer.json'}", "weights", DataError)
    with rejects(*refused, where="init.other_tokenizer"):
        build(tmp_path / "a", other)
    build(tmp_path / "a", same).fit()
    with rejects(*refused):
        build(tmp_path / "a", other, train__steps=2)
    with rejects(*refused, where=tmp_path / "a/run/hf/tokenizer.json"):
        build(tmp_path / "b", other, init__from=str(tmp_path / "a/run"))


@pytest.mark.lane("quick")
@pytest.mark.parametrize("lost", [False, True], ids=["", "the data is gone"])
@pytest.mark.parametrize("made", ["same", "other", "bytes"])
def test_an_export_has_the_tokenizer_of_the_data(
    tmp_path: Path, places: Any, capsys: pytest.CaptureFixture[str], made: str, lost: bool
) -> None:
    root, same, other = places
    hf = shutil.copytree(root / "hf", tmp_path / "hf")
    for name in ("LICENSE", "merges.txt"):
        (hf / name).touch()
    for name in ("config.json", "generation_config.json"):
        table = json.loads((hf / name).read_text())
        (hf / name).write_text(json.dumps({**table, "bos_token_id": 5, "eos_token_id": 6}))
    data = {"same": same, "other": other, "bytes": {}}[made]
    build(tmp_path, data, init__from=str(hf), init__other_tokenizer=made != "same").fit()
    if lost and data:
        config = tmp_path / "run/config.toml"
        config.write_text(config.read_text().replace(str(root), str(tmp_path / "gone")))
    capsys.readouterr()
    export_run(tmp_path / "run", tmp_path / "out")
    out = {p.name: p for p in (tmp_path / "out").iterdir()}
    remark = capsys.readouterr().out.partition("\n")[2]  # behind the line of the export
    ids = [json.loads(out["config.json"].read_text()).get(f"{n}_token_id") for n in ("bos", "eos")]
    assert "LICENSE" in out
    assert ("merges.txt" in out) == (made == "same")
    if made == "same":
        assert ids == [5, 6 if lost else [6, 0]]  # 0 ends the documents of the run
        assert remark == ""
        assert out["tokenizer.json"].read_bytes() == (hf / "tokenizer.json").read_bytes()
    elif made == "bytes" or lost:
        assert "tokenizer.json" not in out
        assert (f"{tmp_path}/gone" if lost and data else "bytes") in remark
        assert ids == [None, None if lost and made != "bytes" else 256]
    else:
        tokens = Path(other["data.sources.text.path"])
        assert out["tokenizer.json"].read_bytes() == (tokens / "tokenizer.json").read_bytes()
        assert len(remark.splitlines()) == 1
        assert ids == [None, 0]


@pytest.mark.parametrize("tied", [False, True])
def test_F204_tokens_that_were_added_get_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tied: bool
) -> None:
    """A folder whose tokenizer has two tokens more than its model has rows: transformers adds them, without draws."""
    transformers = pytest.importorskip("transformers")
    data = tokens_of(tmp_path / "more", [*WORDS, "new", "newer"])
    (tmp_path / "more/text.txt").write_text("the new cat sat on newer mat\n" * 50)
    tokenizer = str(tmp_path / "more/words.json")
    prepare(tmp_path / "more/text.txt", tmp_path / "more/again", tokenizer=tokenizer, eos=WORDS[0])
    data["data.sources.text.path"] = str(tmp_path / "more/again")
    config = transformers.LlamaConfig(
        vocab_size=7, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config)
    hf = tmp_path / "hf"
    theirs.save_pretrained(hf)
    shutil.copy(tokenizer, hf / "tokenizer.json")
    theirs.resize_token_embeddings(9, mean_resizing=False)
    wanted = theirs.model.embed_tokens.weight.detach()
    wanted[7:] = wanted[:7].mean(0)

    keys = {**KEYS, **data, "optimizer.lr": 1e-9, "optimizer.weight_decay": 0.0}
    del keys["model.vocab_size"]
    begin = {"init.from": str(hf)}
    job = {"hf": write_job(tmp_path)}
    for name in ("imported", "few"):
        (tmp_path / name).mkdir()
        job[name] = write_job(tmp_path / name)
    with rejects("data.sources.text", 8, "token_id", DataError, where="init.vocab_size = 9"):
        load_job(job["hf"], {**keys, **begin})
    import_folder(hf, tmp_path / "few/run")
    assert "new, newer" in capsys.readouterr().out
    with rejects("data.sources.text", 8, "token_id", DataError, where="--init.vocab_size 9"):
        load_job(job["few"], keys)
    with rejects("model.vocab_size", 9, "weights", ConfigError, where="init.vocab_size"):
        load_job(job["few"], {**keys, "model.vocab_size": 9})
    with rejects("init.vocab_size", 6, "range", ConfigError):
        load_job(job["hf"], {**keys, **begin, "init.vocab_size": 6})
    with rejects("init.vocab_size", 9, "requires", ConfigError):
        load_job(job["hf"], {**keys, "init.vocab_size": 9})
    import_folder(hf, tmp_path / "imported/run", vocab_size=9)
    assert "newer" not in capsys.readouterr().out
    Trainer(load_job(job["hf"], {**keys, **begin, "init.vocab_size": 9})).fit()
    Trainer(load_job(job["hf"], {**keys, **begin, "init.vocab_size": 9, "train.steps": 2})).fit()
    Trainer(load_job(job["imported"], keys)).fit()
    for run in (tmp_path / "run", tmp_path / "imported/run"):
        export_run(run, run / "out")
        found = transformers.AutoModelForCausalLM.from_pretrained(run / "out")
        assert found.config.vocab_size == 9
        torch.testing.assert_close(
            found.model.embed_tokens.weight.detach(), wanted, atol=1e-6, rtol=0
        )
        head = found.lm_head.weight.detach()
        torch.testing.assert_close(head[7:], head[:7].mean(0).expand(2, -1), atol=1e-6, rtol=0)
    with rejects("init.vocab_size", 10, "source", ConfigError):
        other = {"run.dir": str(tmp_path / "fork"), "init.from": str(tmp_path / "run"), "init.vocab_size": 10}  # fmt: skip
        Trainer(load_job(job["hf"], {**keys, **other})).fit()

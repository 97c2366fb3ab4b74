"""Prompts of a file and held-out texts begin as those of the run did (F142)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core import SamplingConfig
from forge_lab import text
from forge_lab.evaluate import evaluation_job
from forge_train import RunDirectory, load_job

pytestmark = pytest.mark.lane("test")


class Letters:
    """A tokenizer of letters whose texts begin with the token 1."""

    eos_id, end_ids, begin_ids, vocab_size = 0, (0,), (1,), 128

    def encode(self, prompt: str) -> list[int]:
        return [ord(letter) for letter in prompt]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_F142_prompts_of_a_file_begin_with_the_first_token_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(text, "generate_stream", lambda model, ids, *_, **__: seen.append(ids))
    monkeypatch.setattr(text, "generate", lambda model, ids, *_, **__: seen.append(ids) or torch.zeros(1, 0))  # fmt: skip
    list(text.continue_all(None, Letters(), ["ab"], SamplingConfig(), 1, None, 1))  # type: ignore[arg-type]
    assert seen == [[[1, 97, 98]]] * 2


@pytest.mark.parametrize("older", [True, False])
def test_F142_held_out_texts_of_a_run_of_before_begin_without_a_token(
    older: bool, tmp_path: Path
) -> None:
    """Its config.toml has no bos; sets of another file begin as those of the run."""
    library = pytest.importorskip("tokenizers")
    words = library.Tokenizer(library.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.add_special_tokens(["b"])
    words.save(str(tmp_path / "tokenizer.json"))
    for name in ("train", "validation"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("a b " * 40)
    table = f'name = "text"\npath = "{tmp_path}"\n'
    words_of = f'tokenizer = "{tmp_path}/tokenizer.json"\neos = "b"\n'
    more = f'[eval.sets.more]\n{table}split = "validation"\n[eval.sets.more.text]\n{words_of}'
    mine = f"[data.sources.mine]\n{table}[data.sources.mine.text]\n{words_of}"
    (tmp_path / "job.toml").write_text(
        f'run.dir = "{tmp_path}/run"\ndata.seq_len = 8\n{mine}{more}'
    )
    job = load_job(
        tmp_path / "job.toml", {"model.vocab_size": 2, "train.steps": 1}, with_data=False
    )
    run = RunDirectory(tmp_path / "run")
    run.create()
    lines = job.to_toml().splitlines()
    run.config.write_text("\n".join(x for x in lines if not (older and x.startswith("bos ="))))
    other = tmp_path / "other.toml"
    other.write_text(more)
    for given in (None, other):
        found = evaluation_job(run, given, 1)
        assert [s.text.bos for s in found.eval.sets.values()] == [("" if older else None)]

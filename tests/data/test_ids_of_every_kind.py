"""F49: ids over the model's vocabulary are refused before anything starts, whatever the kind of the source."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from forge_data.prepare import prepare
from forge_testing import forge_train
from forge_testing.chats import save_tokenizer, write_dialogs
from forge_testing.jobs import write_job

IDS = np.arange(64) % 61  # the largest is 60


def tokens(folder: Path) -> str:
    (folder / "a.txt").write_text("words " * 40)
    prepare(folder / "a.txt", folder / "tokens")
    return f'name = "tokens"\npath = "{folder}/tokens"\n'


def raw(folder: Path) -> str:
    IDS.astype("<u2").tofile(folder / "raw.bin")
    return f'name = "tokens"\npath = "{folder}/raw.bin"\ndtype = "uint16"\n'


def nanogpt(folder: Path) -> str:
    IDS.astype("<u2").tofile(folder / "train.bin")
    return f'name = "nanogpt"\npath = "{folder}/train.bin"\n'


def llm_c(folder: Path) -> str:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(IDS)
    (folder / "train.bin").write_bytes(header.tobytes() + IDS.astype("<u2").tobytes())
    return f'name = "nanogpt"\npath = "{folder}/train.bin"\n'


def npy(folder: Path) -> str:
    np.save(folder / "a.npy", IDS)
    return f'name = "npy"\npath = "{folder}/a.npy"\n'


def megatron(folder: Path) -> str:
    IDS.astype("<u2").tofile(folder / "text.bin")
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, len(IDS), 0, 0, 1)
    (folder / "text.idx").write_bytes(index)
    return f'name = "megatron"\npath = "{folder}/text"\n'


def text(folder: Path) -> str:
    (folder / "a.txt").write_text("words " * 40)
    return f'name = "text"\npath = "{folder}/a.txt"\ntext = {{cache = "{folder}/cache"}}\n'


def hugging_face(folder: Path, more: str = "") -> str:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["words " * 40]}).save_to_disk(folder / "set")
    more = more or f'cache = "{folder}/cache"'
    return f'name = "huggingface"\npath = "{folder}/set"\nhuggingface = {{{more}}}\n'


def streamed(folder: Path) -> str:
    return hugging_face(folder, "streaming = true")


def chat(folder: Path) -> str:
    pytest.importorskip("transformers")
    save_tokenizer(folder / "tokenizer")
    write_dialogs(folder / "talks.jsonl")
    table = f'tokenizer = "{folder}/tokenizer", cache = "{folder}/cache"'
    return f'name = "chat"\npath = "{folder}/talks.jsonl"\nchat = {{{table}}}\n'


KINDS: list[Callable[[Path], str]] = [
    tokens, raw, nanogpt, llm_c, npy, megatron, text, hugging_face, streamed, chat,
]  # fmt: skip


def refused(job: Path, key: str) -> None:
    flags = ["--model.vocab_size", "40", "--sample.max_new_tokens", "0"]
    done = forge_train("run", job, *flags)
    assert done.code == 65, done.err
    found = re.search(rf"{key} (\d+) .*model\.vocab_size 40.*model\.vocab_size = (\d+)", done.err)
    assert found, done.err
    assert int(found[2]) == int(found[1]) + 1 > 40
    assert "Traceback" not in done.err
    assert not (job.parent / "run").exists()
    assert not (job.parent / "cache").exists(), "tokenized before"


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("kind", KINDS)
def test_F49_ids_over_the_vocabulary_are_rejected_before_a_run(
    tmp_path: Path, kind: Callable[[Path], str]
) -> None:
    job = write_job(tmp_path)
    job.write_text(job.read_text().replace('name = "builtin"\n', kind(tmp_path)))
    job.write_text(job.read_text().replace("every_steps = 6", "every_steps = 0"))
    refused(job, "data.sources.text")


@pytest.mark.slow
def test_F49_of_a_second_source_and_of_validation(tmp_path: Path) -> None:
    IDS[:39].astype("<u2").tofile(tmp_path / "low.bin")
    IDS.astype("<u2").tofile(tmp_path / "high.bin")
    one = 'name = "nanogpt"\npath = "{0}/{1}.bin"\n'
    job = write_job(tmp_path, "[data.sources.more]\n" + one.format(tmp_path, "high"))
    low = one.format(tmp_path, "low")
    job.write_text(job.read_text().replace('name = "builtin"\n', low))
    job.write_text(job.read_text().replace("every_steps = 6", "every_steps = 0"))
    refused(job, "data.sources.more")
    job = write_job(tmp_path, "[data.validation]\n" + one.format(tmp_path, "high"))
    job.write_text(job.read_text().replace('name = "builtin"\n', low))
    refused(job, "data.validation")

"""Every mistake gets a non-zero exit, in under 3 s, with one message that names value, rule and fix."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from forge_testing import Outcome, forge_train, start, wait_for_step, write_job

CONFIG, DATA, CORRUPT = 78, 65, 66
LIMIT_SECONDS = 3.0
LIMIT_WITH_CHECKPOINTS_SECONDS = (
    4.0  # what only a model, an optimizer and a read from disk can show
)


class Case(NamedTuple):
    """`args(folder)` is the command line after `run`; `says` are the parts the message must hold."""

    name: str
    args: Callable[[Path], list[str | Path]]
    code: int
    says: tuple[str, ...]


def flags(*more: str) -> Callable[[Path], list[str | Path]]:
    return lambda folder: [write_job(folder), *more]


def toml(extra: str) -> Callable[[Path], list[str | Path]]:
    """A job file with lines replaced or added: `section.key = value`, `key` may be new."""

    def build(folder: Path) -> list[str | Path]:
        job = write_job(folder)
        (folder / "child.toml").write_text(f'extends = "{job.name}"\n{extra}\n')
        return [folder / "child.toml"]

    return build


def token_file(folder: Path, ids: int = 4000, top: int = 256, **sidecar: object) -> Path:
    """A prepared token directory of `ids` bytes, with fields of its sidecar replaced."""
    text = folder / "text.txt"
    text.write_text("some words to read\n" * (ids // 19 + 1))
    from forge_data.prepare import prepare

    out = folder / "tokens"
    prepare([text], out)
    meta = next(out.glob("*.json"))
    meta.write_text(json.dumps({**json.loads(meta.read_text()), **sidecar}))
    return out


def data_job(folder: Path, path: Path, *more: str, dtype: str | None = None) -> list[str | Path]:
    job = write_job(folder)
    text = job.read_text().replace('name = "builtin"', f'name = "tokens"\npath = "{path}"')
    if dtype:
        text = text.replace("[train]", f'dtype = "{dtype}"\n[train]', 1)
    job.write_text(text)
    return [job, "--eval.every_steps", "0", *more]


def truncated(folder: Path) -> list[str | Path]:
    path = token_file(folder)
    tokens = path / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-7])
    return data_job(folder, path)


def raw_without_dtype(folder: Path) -> list[str | Path]:
    raw = folder / "raw.bin"
    raw.write_bytes(bytes(range(200)) * 20)
    return data_job(folder, raw, "--sample.max_new_tokens", "0")


def vocabulary(folder: Path) -> list[str | Path]:
    return data_job(folder, token_file(folder), "--model.vocab_size", "64")


def unwritable(folder: Path) -> list[str | Path]:
    (folder / "file").write_text("in the way")
    return [write_job(folder), "--run.dir", str(folder / "file/run")]


def other_model(folder: Path) -> list[str | Path]:
    job = write_job(folder)
    done = forge_train("run", job, "--train.steps", "2")
    assert done.code == 0, done.err
    return [job, "--model.dim", "32"]


def damaged_store(folder: Path) -> list[str | Path]:
    job = write_job(folder)
    assert forge_train("run", job, "--train.steps", "2").code == 0
    for manifest in (folder / "run/checkpoints").glob("step-*/manifest.json"):
        manifest.write_text("{}")
    return [job]


def changed_data(folder: Path) -> list[str | Path]:
    path = token_file(folder)
    first = data_job(folder, path)
    assert forge_train("run", *first, "--train.steps", "2").code == 0
    (folder / "text.txt").unlink()
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    token_file(folder, ids=5000)
    return first


def missing_toml(folder: Path) -> list[str | Path]:
    return [folder / "nothing.toml"]


def broken_toml(folder: Path) -> list[str | Path]:
    (folder / "broken.toml").write_text("[train\nsteps = 3")
    return [folder / "broken.toml"]


def circle(folder: Path) -> list[str | Path]:
    (folder / "a.toml").write_text('extends = "b.toml"')
    (folder / "b.toml").write_text('extends = "a.toml"')
    return [folder / "a.toml"]


CASES = [
    Case("unknown key", toml("[train]\nstepz = 3"), CONFIG, ("train.stepz", "did you mean train.steps")),
    Case("unknown section", toml("[trian]\nsteps = 3"), CONFIG, ("trian", "did you mean train")),
    Case("unknown flag", flags("--train.stepz", "3"), CONFIG, ("--train.stepz", "--train.steps")),
    Case("float for an int", toml("[model]\nnum_heads = 1.9"), CONFIG,
         ("model.num_heads", "1.9", "must be an integer")),
    Case("float flag for an int", flags("--model.num_heads", "1.9"), CONFIG,
         ("model.num_heads", "1.9")),
    Case("misspelt bool", toml('[model]\ntie_embeddings = "flase"'), CONFIG,
         ("model.tie_embeddings", "flase", "true or false")),
    Case("misspelt bool flag", flags("--model.tie_embeddings", "flase"), CONFIG,
         ("model.tie_embeddings", "flase", "true")),
    Case("int for a bool", toml("[model]\nqk_norm = 1"), CONFIG, ("model.qk_norm", "true or false")),
    Case("misspelt choice", toml('[parallel]\nprecision = "bf61"'), CONFIG,
         ("parallel.precision", "bf61", "did you mean 'bf16'")),
    Case("indivisible heads", flags("--model.num_heads", "3"), CONFIG,
         ("dim 16", "num_heads 3", "divisible")),
    Case("indivisible batch", flags("--train.micro_batch", "3"), CONFIG,
         ("global_batch 4", "micro_batch 3", "use micro_batch 1, 2, 4")),
    Case("two lengths", toml("[train]\nsteps = 3\ntokens = 100"), CONFIG,
         ("steps, tokens", "exactly one")),
    Case("warm-up longer than the run", flags("--schedule.warmup_steps", "50"), CONFIG,
         ("warmup_steps", "50", "12")),
    Case("row longer than the model", flags("--model.max_seq_len", "16"), CONFIG,
         ("data.seq_len 32", "model.max_seq_len 16")),
    Case("several problems at once", toml("[train]\nglobal_batch = 0\n[optimizer]\nlr = -1.0"), CONFIG,
         ("global_batch 0", "lr")),
    Case("a table where a value belongs", toml("[train.steps]\nx = 1"), CONFIG, ("train.steps",)),
    Case("a value where a table belongs", toml("eval = 3"), CONFIG, ("eval", "table")),
    Case("missing config file", missing_toml, CONFIG, ("nothing.toml", "No such file")),
    Case("broken TOML", broken_toml, CONFIG, ("broken.toml", "not valid TOML", "line 1")),
    Case("circle of extends", circle, CONFIG, ("circle", "a.toml", "b.toml")),
    Case("model that cannot be imported", flags("--model.name", "no_lab.model:build"), CONFIG,
         ("no_lab.model:build", "cannot be imported")),
    Case("callback that cannot be imported", flags("--train.callbacks", "no_lab.hooks:Mine"), CONFIG,
         ("no_lab.hooks:Mine", "cannot be imported")),
    Case("no such optimizer", flags("--optimizer.name", "adamww"), CONFIG, ("adamww", "adamw")),
    Case("no GPU", flags("--parallel.device", "cuda"), CONFIG, ("cuda", "cpu")),
    Case("missing data path", lambda f: data_job(f, f / "nowhere"), DATA, ("nowhere",)),
    Case("truncated token file", truncated, DATA, ("tokens.bin", "bytes")),
    Case("F41 raw file without dtype", raw_without_dtype, DATA, ("raw.bin", "dtype")),
    Case("F49 vocabulary too small", vocabulary, DATA, ("model.vocab_size 64", "must be below")),
    Case("unwritable run directory", unwritable, CONFIG, ("file/run", "cannot be written")),
    Case("checkpoint of another model", other_model, CONFIG, ("model.dim was 16", "32")),
    Case("no checkpoint verifies", damaged_store, CORRUPT, ("step-", "manifest")),
    Case("data changed under a run", changed_data, DATA, ("other data", "source.num_tokens: checkpoint")),
]  # fmt: skip


def snapshot(folder: Path) -> dict[str, bytes]:
    """Committed files below `folder` that no refusal may change (an event or a quarantine may be added)."""
    kept = [f for f in folder.rglob("*") if f.is_file() and "checkpoints" in f.parts]
    return {f"{f.parent.name.split('-')[-1]}/{f.name}": f.read_bytes()
            for f in kept if f.name not in ("lock",)}  # fmt: skip


def _again_if_slow(refused: Outcome, *args: str | Path) -> float:
    if refused.seconds < LIMIT_SECONDS:
        return refused.seconds
    return forge_train("run", *args).seconds


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bad_input_is_refused_with_value_rule_and_fix(tmp_path: Path, case: Case) -> None:
    if case.name == "no GPU":
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has one")
    args = case.args(tmp_path)
    before = snapshot(tmp_path)
    refused = forge_train("run", *args)
    message = re.sub(r"[\s│╭╮╰╯─]+", " ", refused.err)
    assert refused.code == case.code, (refused.code, refused.err)
    assert "Traceback" not in refused.err
    for part in case.says:
        assert part in message, message
    # one more try where the machine was busy: a refusal is a refusal again
    limit = LIMIT_SECONDS
    if any(tmp_path.glob("*/checkpoints/step-*")) or any(
        tmp_path.glob("*/checkpoints/quarantine/*")
    ):
        limit = LIMIT_WITH_CHECKPOINTS_SECONDS
    assert min(refused.seconds, _again_if_slow(refused, *args)) < limit
    after = snapshot(tmp_path)
    assert sorted(after.values()) == sorted(before.values()), "something on disk was lost"


def test_a_run_directory_in_use_is_refused_and_the_first_run_goes_on(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    first = start("run", job, "--train.steps", "100000")
    try:
        wait_for_step(first, tmp_path / "run/metrics.jsonl", 1)
        first.send_signal(signal.SIGSTOP)  # it keeps its lock and leaves the cores to the second
        second = forge_train("run", job)
        slow = _again_if_slow(second, job)
        first.send_signal(signal.SIGCONT)
        assert second.code == CONFIG, second.err
        assert str(first.pid) in second.err
        assert "in use" in second.err
        assert min(second.seconds, slow) < LIMIT_SECONDS
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGCONT)
        first.terminate()
        first.communicate()
    assert first.returncode == 75


def test_all_problems_come_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(
        '[run]\nseed = "x"\n[model]\ndim = 30\nnum_heads = 4\n[data.sources.a]\nname = "builtin"\n'
        "[train]\nsteps = 0\nglobal_bach = 4\n[eval]\nevery_steps = true\n"
    )
    refused = forge_train("run", tmp_path / "bad.toml")
    for part in ("run.seed", "dim 30", "steps 0", "train.global_bach", "eval.every_steps"):
        assert part in refused.err, refused.err


def test_help_lists_every_key(tmp_path: Path) -> None:
    from forge_train.config.describe import key_rows

    for args in (["--help"], ["run", "--help"]):
        shown = forge_train(*args)
        assert shown.code == 0
        for row in key_rows():
            key = row.key.replace("<name>", "NAME") if args[0] == "run" else row.key
            if row.type != "table" and "model.args" not in key:
                assert key in re.sub(r"\n\s*│?\s*", "", shown.out) or key in shown.out, key


@pytest.mark.parametrize("verb", ["generate", "explain"])
def test_other_verbs_refuse_too(tmp_path: Path, verb: str) -> None:
    refused = forge_train(verb, tmp_path / "nothing")
    assert refused.code == CONFIG
    assert "nothing" in refused.err
    assert os.sep in refused.err

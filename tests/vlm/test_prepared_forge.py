"""Jobs on prepared and on streamed conversations: the rows of the files, after a kill on other ranks too; wrong rows refused."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.vlm.file_jobs import write_numbered

from forge_data import SourceConfig, open_stream
from forge_testing import forge_train, start, wait_for_step
from forge_testing.faults import signal_rank
from forge_testing.problems import ANY, rejects
from forge_testing.runs import (
    assert_same_bits,
    assert_same_rows,
    columns,
    fit_alone,
    fit_on_ranks,
    saved_tensors,
)
from forge_testing.squares import Squares
from forge_testing.vlm_jobs import CLIP, flags, write_vlm_job
from forge_train import Callback, ConfigError, DataError
from forge_train.build.evaluation import prompts_of
from forge_train.config.init import InitConfig
from forge_vlm import VLM, ModalityConfig, VisionConfig, VLMConfig
from forge_vlm.data import Prepared, Prompts, options_of
from forge_vlm.data.prepare import prepare as prepare_talks
from forge_vlm.vision import build_encoder

pytestmark = pytest.mark.lane("test")

OPTIONS: dict[str, Any] = {
    "resolution": {"fixed": {"size": 8}},
    "tokens_per_tile": 4,
    "template": "plain",
}
STREAMED = {**OPTIONS, "streaming": True, "virtual_shards": 6, "shuffle_window": 4}
KEYS = {
    "data.seq_len": 24,
    "model.max_seq_len": 24,
    "model.modalities.image.first_id": 257,
    "eval.every_steps": 0,
    "train.steps": 12,
    "checkpoint.every_steps": 3,
    "checkpoint.wait": True,
}


def talks(folder: Path, count: int = 120) -> Path:
    """Conversations of 0 to 2 pictures, long enough for many pieces; those with padding are short as tokens."""
    return write_numbered(folder, count, "abcdefg", note="x" * 200)


def keys_of(path: Path, options: dict[str, Any] = OPTIONS, **more: Any) -> dict[str, Any]:
    source = {"name": "forge_vlm.data:open_source", "path": str(path), "options": options}
    return {**{f"data.sources.squares.{k}": v for k, v in source.items()}, **KEYS, **more}


def job_of(folder: Path, path: Path, options: dict[str, Any] = OPTIONS) -> Path:
    """The job as TOML, for processes of their own."""
    text = write_vlm_job(folder).read_text()
    source = (
        f'name = "forge_vlm.data:open_source"\npath = "{path}"\n[data.sources.squares.options]\n'
    )
    rows = dict(options)
    size = rows.pop("resolution")["fixed"]["size"]
    source += f"resolution = {{ fixed = {{ size = {size} }} }}\n"
    source += "\n".join(f"{key} = {json.dumps(value)}" for key, value in rows.items())
    text = text.replace('name = "forge_testing.squares:Squares"', source)
    for old, new in (
        ("seq_len = 8\n", "seq_len = 24\n"),
        ("max_seq_len = 16", "max_seq_len = 24"),
        ("first_id = 2\n", "first_id = 257\n"),
        ("steps = 6", "steps = 12"),
        ("every_steps = 3\nsequences", "every_steps = 0\nsequences"),
        ("[checkpoint]\nevery_steps = 0", "[checkpoint]\nevery_steps = 3\nwait = true"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    (folder / "job.toml").write_text(text)
    return folder / "job.toml"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talks(tmp_path_factory.mktemp("talks"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, files: Path) -> Path:
    """A streamed run in one process, which nothing stops."""
    job = job_of(tmp_path_factory.mktemp("whole"), files, STREAMED)
    fit_alone(job)
    return job


def prepare(job: Path, out: Path) -> None:
    """`forge-vlm prepare` as a process of its own."""
    command = [sys.executable, "-m", "forge_vlm", "prepare", str(job), "--output", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_prepared_job_trains_with_the_bits_of_its_files(tmp_path: Path, files: Path) -> None:
    job, out = job_of(tmp_path / "a", files), tmp_path / "out"
    prepare(job, out)
    fit_alone(job)
    fit_alone(job_of(tmp_path / "b", out))
    runs = [saved_tensors(tmp_path / name / "run") for name in "ab"]
    assert_same_bits(*runs)


@pytest.mark.slow
def test_a_run_goes_on_from_files_with_the_folder_that_was_prepared(
    tmp_path: Path, files: Path
) -> None:
    """The fingerprint is that of the files, so a resume takes the folder in their place."""
    out = tmp_path / "out"
    job = job_of(tmp_path / "a", files)
    prepare(job, out)
    fit_alone(job, **{"train.steps": 12})
    other = job_of(tmp_path / "b", files)
    fit_alone(other, **{"train.steps": 6, "schedule.name": "constant"})
    job_of(tmp_path / "b", out)
    fit_alone(other)
    assert_same_rows(columns(other), columns(job))


def letters(folder: Path) -> Path:
    """A tokenizer of single letters whose ids are not those of bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: 255 - i for i, c in enumerate(letters)}, merges=[])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["</s>", "<image>", "<s>"])
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_F136_questions_are_written_as_the_rows_of_a_prepared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens up to the first label, and the pixels, are those of the rows; so with streaming, which prepare has not."""
    path = talks(tmp_path / "talks", 4)
    monkeypatch.chdir(letters(tmp_path))
    fixed = {"fixed": {"size": 16, "fit": "pad"}}
    options = {"resolution": fixed, "tokens_per_tile": 4, "template": "vicuna", "bos": "<s>"}
    options |= {"tokenizer": "tokenizer.json", "mean": [0.1, 0.5, 0.9]}
    prepare_talks(str(path), "out", options_of(str(path), options))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    out, row_options = tmp_path / "out", {"pack": False, "too_long": "skip"}
    rows = Prepared(out)

    def asked(path: Path, options: dict[str, Any]) -> Prompts:
        source = SourceConfig("vlm", str(path), options=options, split="train")
        data, run = SimpleNamespace(sources={"talks": source}), SimpleNamespace(dir=str(tmp_path))
        return prompts_of(SimpleNamespace(data=data, run=run, init=InitConfig()))  # type: ignore[arg-type]

    streamed = {"streaming": True, "virtual_shards": 6, "shuffle_window": 4}
    own = {**options, **streamed, "tokenizer": str(tmp_path / "tokenizer.json")}
    for prompts in asked(out, {}), asked(out, row_options), asked(path, own):
        for number, prompt in enumerate(prompts.read(path)):
            row = rows.sample(number)
            known = row.tokens[: np.flatnonzero(row.labels != -100)[0] + 1]
            assert prompt.tokens.tolist() == known.tolist()
            wanted = [m["images"] for m in rows.decoder.media(row)[0]]
            assert torch.equal(prompts.media([prompt])["images"], torch.cat([torch.zeros(0, 3, 16, 16, dtype=torch.uint8), *wanted]))  # fmt: skip
    with rejects("template", "chatml", "mismatch", ConfigError):
        asked(out, {"template": "chatml"})
    with (tmp_path / "tokenizer.json").open("a") as file:
        file.write("\n")
    with rejects("tokenizer", ANY, "mismatch", ConfigError):
        asked(out, {})


class Stop(Callback):
    """A scheduler's signal in the fifth step: the run saves and ends."""

    def on_step_end(self, trainer: Any, *_: Any) -> None:
        if trainer.progress.step == 5:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("before", "after", "workers"), [(2, 3, 0), (3, 1, 2), (1, 3, 1)])
def test_a_streamed_run_is_stopped_and_goes_on_with_the_same_rows_on_other_ranks(
    tmp_path: Path, files: Path, whole: Path, before: int, after: int, workers: int
) -> None:
    job = job_of(tmp_path, files, STREAMED)
    stopped = fit_on_ranks(before, job, Stop)
    assert {rank.step for rank in stopped} == {6}  # the step of the signal is under way
    done = fit_on_ranks(after, job, data__num_workers=workers)
    assert all(rank.problems == () for rank in done)
    assert_same_rows(columns(job), columns(whole))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("nproc", [1, 3])
def test_a_streamed_run_of_two_ranks_is_killed_and_goes_on_with_the_same_rows(
    tmp_path: Path, files: Path, whole: Path, nproc: int
) -> None:
    job = job_of(tmp_path, files, STREAMED)
    first = start("run", job, "--nproc", "2")
    wait_for_step(first, tmp_path / "run/metrics.jsonl", 5)
    signal_rank(first.pid, 0, signal.SIGKILL)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 1, err
    done = forge_train("run", job, "--nproc", str(nproc))
    assert done.code == 0, done.err
    assert_same_rows(columns(job), columns(whole))


def test_images_of_a_stream_belong_to_their_conversations(files: Path) -> None:
    """Each placeholder's number is that of the pictures, in a mixture with prepared files too."""
    config = SourceConfig("forge_vlm.data:open_source", str(files), options=STREAMED, split="train")
    found = open_stream(config, 24, seed=1).arrays(np.arange(48))
    counts = torch.as_tensor((found["tokens"] == 257).sum(1)) // 4
    assert found["images"].row_offsets.diff().tolist() == counts.tolist()


class Copies(Squares):
    """Whose labels nobody shifted."""

    def stream(self, seq_len: int, seed: int) -> Any:
        rows = super().stream(seq_len, seed)
        arrays = rows.arrays

        def unshifted(ids: Any) -> dict[str, Any]:
            found = arrays(ids)
            return {**found, "labels": np.where(found["tokens"] == 2, -100, found["tokens"])}

        rows.arrays = unshifted  # type: ignore[method-assign]
        return rows


@pytest.mark.lane("quick")
@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2])
def test_labels_that_are_not_shifted_are_rejected(tmp_path: Path, world: int) -> None:
    job = write_vlm_job(tmp_path)
    keys = {"data.sources.squares.name": f"{__name__}:Copies"}
    if world == 1:
        with pytest.raises(DataError, match=r"labels [0-9]+ of"):
            fit_alone(job, **keys)
        return
    done = fit_on_ranks(2, job, **flags(keys))
    assert all(re.search("labels [0-9]+ of", str(r.problems)) for r in done)


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("keys", "options", "key", "value", "code"),
    [
        ({}, {"positions": "text_preserving"}, "positions", "text_preserving", "mismatch"),
        ({"model.modalities.image.first_id": 9}, {}, "image", "<image>", "placeholder"),
        ({}, {"tokens_per_tile": 1}, "tokens_per_tile", 1, "tokens"),
        (
            {},
            {"resolution": {"fixed": {"size": 16}}},
            *("resolution.fixed.size", 16, "image_size"),
        ),
        ({"model.adapter.name": "average_pool"}, {}, "tokens_per_tile", 4, "tokens"),
    ],
)
def test_rows_that_are_not_those_of_the_model_are_rejected_by_both_keys(
    tmp_path: Path,
    files: Path,
    keys: dict[str, Any],
    options: dict[str, Any],
    key: str,
    value: Any,
    code: str,
) -> None:
    given = keys_of(files, {**OPTIONS, **options}, **keys)
    with rejects(f"data.sources.squares.options.{key}", value, code, ConfigError):
        fit_alone(write_vlm_job(tmp_path), **given)


def test_a_streamed_source_is_no_validation(tmp_path: Path, files: Path) -> None:
    keys = keys_of(files, **{"eval.every_steps": 3})
    own = {"name": "forge_vlm.data:open_source", "path": str(files), "options": STREAMED}
    keys |= {f"data.validation.{key}": value for key, value in own.items()}
    with rejects("data.validation", ..., "streaming", ConfigError):
        fit_alone(write_vlm_job(tmp_path), **keys)


SMOLVLM = {**CLIP, "model_type": "smolvlm_vision", "num_hidden_layers": 1}


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("masks", [True, False])
def test_a_damaged_image_is_masked_in_the_encoder_and_the_batch_trains(
    tmp_path: Path, masks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = talks(tmp_path / "talks")
    (tmp_path / "talks/1-0.png").write_bytes(b"damaged")
    options = {**OPTIONS, "corrupt": "mask", **({"image_masks": True} if masks else {})}
    vision = {"model.vision.name": "transformers", "model.vision.transformers": SMOLVLM}
    keys = keys_of(path, options, **vision)
    seen: list[torch.Tensor | None] = []
    encoder = type(build_encoder(VisionConfig("transformers", transformers=SMOLVLM)))
    real = encoder.forward

    def watched(self: Any, images: Any, image_masks: Any = None) -> Any:
        seen.append(None if image_masks is None else image_masks.values)
        found = real(self, images, image_masks)
        assert found.tokens.isfinite().all()
        return found

    monkeypatch.setattr(encoder, "forward", watched)
    job = write_vlm_job(tmp_path)
    done = fit_alone(job, **keys)
    assert done.step == 12
    assert all(torch.isfinite(t).all() for t in saved_tensors(tmp_path / "run").values())
    if masks:
        empty = sum(int((m.flatten(1).sum(1) == 0).sum()) for m in seen if m is not None)
        assert empty >= 1
    else:
        assert not any(m is not None for m in seen)


def test_a_damaged_image_contributes_nothing(tmp_path: Path) -> None:
    """Whatever stands for it, loss and gradients are the same bits; those of other pictures are not."""
    path = talks(tmp_path, 12)
    (tmp_path / "1-0.png").write_bytes(b"damaged")
    options = {**OPTIONS, "corrupt": "mask", "image_masks": True}
    config = SourceConfig("forge_vlm.data:open_source", str(path), options=options, split="train")
    stream = open_stream(config, 24)
    found = {
        n: v if hasattr(v, "values") else torch.as_tensor(v)
        for n, v in stream.arrays(np.arange(len(stream))).items()
    }
    masks = found["image_masks"].values
    damaged = masks.flatten(1).sum(1) == 0
    assert damaged.sum() == 1
    vision = VisionConfig("transformers", transformers=SMOLVLM)
    model = VLM(
        VLMConfig(
            258, 16, 1, 2, max_seq_len=24, vision=vision, modalities={"image": ModalityConfig(257)}
        )
    )

    def gradients(where: torch.Tensor) -> list[torch.Tensor]:
        pixels = found["images"].values.clone()
        pixels[where] = torch.randint_like(pixels[where], 256)
        model.zero_grad()
        names = ("tokens", "positions", "document_ids")
        logits = model(*(found[n] for n in names), images=pixels, image_masks=masks)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), found["labels"].flatten())
        loss.backward()
        parts = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [loss.detach(), *parts]

    first = gradients(torch.zeros_like(damaged))
    assert all(part.isfinite().all() for part in first)
    assert all(torch.equal(one, two) for one, two in zip(first, gradients(damaged)))
    assert not torch.equal(first[0], gradients(~damaged)[0])

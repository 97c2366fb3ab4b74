"""Rows with pictures through the loader: the same on any number of ranks and workers, and after a stop."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.vlm.file_jobs import write_numbered

from forge_data import Loader, SourceConfig, open_stream
from forge_data.mixed_stream import MixedStream
from forge_data.mixture import Phase
from forge_testing.problems import rejects
from forge_testing.runs import assert_same_bits, columns, fit_alone, fit_on_ranks, saved_tensors
from forge_testing.vlm_jobs import flags, write_vlm_job
from forge_train import ConfigError, load_job, load_trained
from forge_train.build.layout import layout_problems
from forge_vlm import VLM, ModalityConfig, VisionConfig, VLMConfig
from forge_vlm.vision import ViTConfig

pytestmark = pytest.mark.lane("test")

OPTIONS = {
    "resolution": {"fixed": {"size": 8}},
    "tokens_per_tile": 4,
    "template": "plain",
}


def talks(folder: Path) -> Path:
    """Forty conversations of 0 to 2 pictures; pixel (0, 0) is the number of the conversation."""
    return write_numbered(folder, 40, "xxxxxxx")


def stream_of(path: Path, **options: Any) -> Any:
    config = SourceConfig(
        "forge_vlm.data:open_source", str(path), options={**OPTIONS, **options}, split="train"
    )
    return open_stream(config, 24, seed=1)


def sequence(batches: list[Any]) -> list[tuple[int, list[int], list[list[int]]]]:
    """(instance, tokens, first pixels of its pictures) of all rows that are no filler, in the order of the stream."""
    found = []
    for batch in batches:
        images = batch.extras["images"]
        for row, instance in enumerate(batch.instance_ids.tolist()):
            pixels = images[row : row + 1].values[:, :2, 0, 0]
            if instance >= 0:
                found.append((instance, batch.tokens[row].tolist(), pixels.tolist()))
    return sorted(found)


@pytest.mark.lane("quick")
@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 0), (3, 1), (5, 0)])
def test_ranks_and_workers_read_what_one_process_reads(
    tmp_path: Path, world: int, workers: int
) -> None:
    path = talks(tmp_path)
    alone = Loader(stream_of(path), 8)
    wanted = sequence([next(alone) for _ in range(6)])
    found = []
    for rank in range(world):
        loader = Loader(stream_of(path), 8, rank, world, num_workers=workers)
        with contextlib.closing(loader):
            found += [next(loader) for _ in range(6)]
    assert sequence(found) == wanted
    # each picture belongs to its conversation: no pixel is of another one
    for _, tokens, pixels in wanted:
        assert tokens.count(257) == 4 * len(pixels)


@pytest.mark.lane("quick")
def test_a_stopped_reader_goes_on_with_the_same_rows(tmp_path: Path) -> None:
    path = talks(tmp_path)
    loader = Loader(stream_of(path), 8)
    batches = [next(loader) for _ in range(3)]
    state = loader.state_dict()
    wanted = [next(loader) for _ in range(3)]
    again = Loader(stream_of(path), 8)
    again.load_state_dict(state)
    assert sequence([next(again) for _ in range(3)]) == sequence(wanted)
    epoch = [next(loader) for _ in range(2)]
    ids = {i for b in [*batches, *wanted, *epoch] for i in b.instance_ids.tolist()}
    assert ids == set(range(64))


def test_another_template_is_rejected_at_a_resume(tmp_path: Path) -> None:
    path = talks(tmp_path)
    loader = Loader(stream_of(path), 8)
    next(loader)
    changed = Loader(stream_of(path, weigh="sqrt"), 8)
    with rejects("fingerprint", ["source.options"], "mismatch"):
        changed.load_state_dict(loader.state_dict())


def test_weights_are_those_of_the_batch(tmp_path: Path) -> None:
    batch = next(Loader(stream_of(talks(tmp_path), weigh="sample", pack=False), 8))
    assert batch.weights is not None
    assert batch.label_weight == pytest.approx(8.0)  # each sample counts once
    assert torch.equal((batch.labels != -100).any(1), torch.ones(8, dtype=torch.bool))
    assert np.isclose(float(batch.weights[batch.labels != -100].sum()), 8.0)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_model_learns_from_batches_of_the_loader(tmp_path: Path) -> None:
    """From files to a step: the loss of forty conversations falls, and rows without pictures are among them."""
    batches = Loader(stream_of(talks(tmp_path)), 8)
    vit = ViTConfig(image_size=8, patch_size=4, dim=8, num_layers=1, num_heads=2)
    model = VLM(
        VLMConfig(
            vocab_size=258,
            dim=16,
            num_layers=1,
            num_heads=2,
            max_seq_len=24,
            vision=VisionConfig(vit=vit),
            modalities={"image": ModalityConfig(257)},
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for batch, _ in zip(batches, range(20)):
        logits = model(batch.tokens, batch.positions, batch.document_ids, **batch.extras)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.lane("quick")
def test_images_stay_with_their_sequences_in_a_mixture(tmp_path: Path) -> None:
    """Of two sources in shares: each row is one of its own source, with its pictures."""
    (tmp_path / "a").mkdir()
    paths = {"a": talks(tmp_path / "a"), "b": talks(tmp_path)}
    streams = {name: stream_of(path, weigh="sqrt") for name, path in paths.items()}
    mixed = MixedStream(streams, [Phase(0, (2.0, 1.0))])
    own = {n: sequence([next(Loader(s, 8)) for _ in range(3)]) for n, s in streams.items()}
    rows = {tuple(tokens): pixels for n in own for _, tokens, pixels in own[n]}
    found = sequence([next(Loader(mixed, 8, num_workers=1))])
    assert all(rows[tuple(tokens)] == pixels for _, tokens, pixels in found)


def test_options_that_a_source_does_not_have_are_rejected(tmp_path: Path) -> None:
    with rejects("size", 3, "unknown_key"):
        stream_of(talks(tmp_path), size=3)


@pytest.mark.slow
def test_a_job_of_files_trains_and_resumes(tmp_path: Path) -> None:
    """From a configuration alone; from the checkpoint in its middle a run ends with the same bits."""
    source = {"name": "forge_vlm.data:open_source", "path": str(talks(tmp_path))}
    keys = {f"data.sources.squares.{k}": v for k, v in {**source, "options": OPTIONS}.items()}
    keys |= {"data.seq_len": 24, "model.max_seq_len": 24, "model.modalities.image.first_id": 257}
    keys |= {"eval.every_steps": 0, "checkpoint.every_steps": 3, "checkpoint.keep_last": 9}
    job, other = write_vlm_job(tmp_path), tmp_path / "other"
    fit_alone(job, **keys)
    (other / "checkpoints").mkdir(parents=True)
    shutil.copy(tmp_path / "run/config.toml", other)
    step = "checkpoints/step-00000003"
    shutil.copytree(tmp_path / "run" / step, other / step)
    fit_alone(job, **keys, **{"run.dir": str(other)})
    assert_same_bits(saved_tensors(other), saved_tensors(tmp_path / "run"))


def tree_keys(folder: Path) -> dict[str, Any]:
    """A job on ten trees of two answers each, whose pictures see themselves whole."""
    lines = []
    for i in range(10):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / f"{i}.png")
        asked = [{"role": "user", "content": [{"type": "image", "image": f"{i}.png"}]}]
        branches = [[{"role": "assistant", "content": text * i}] for text in ("yx", "zx")]
        lines.append(json.dumps({"messages": asked, "branches": branches}))
    (folder / "trees.jsonl").write_text("\n".join(lines[1:]))
    options = {**OPTIONS, "template": "chatml", "bidirectional": "image"}
    source = {"name": "forge_vlm.data:open_source", "path": str(folder / "trees.jsonl")}
    keys = {f"data.sources.squares.{k}": v for k, v in {**source, "options": options}.items()}
    keys |= {"data.seq_len": 160, "model.max_seq_len": 160, "eval.every_steps": 0}
    return keys | {"model.modalities.image.first_id": 257, "model.bidirectional": "image"}


@pytest.mark.lane("quick")
def test_a_job_of_trees_trains_as_one_of_separate_rows(tmp_path: Path) -> None:
    """The first loss is that of the same answers in records of their own."""
    keys, seen = tree_keys(tmp_path), []
    trees = [json.loads(line) for line in (tmp_path / "trees.jsonl").read_text().splitlines()]
    apart = [{"messages": [*t["messages"], *b]} for t in trees for b in t["branches"]]
    (tmp_path / "apart.jsonl").write_text("\n".join(map(json.dumps, apart)))
    options = {"pack": False, **keys["data.sources.squares.options"]}
    for name, rows in (("trees", 9), ("apart", 18)):
        (tmp_path / name).mkdir()
        own = {"data.sources.squares.path": str(tmp_path / f"{name}.jsonl")}
        own |= {"data.sources.squares.options": options, "train.steps": 1}
        own |= {"train.global_batch": rows, "run.dir": str(tmp_path / name)}
        fit_alone(write_vlm_job(tmp_path / name), **{**keys, **own})
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        seen.append(next(json.loads(x)["loss"] for x in lines if "loss" in json.loads(x)))
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)


def test_branches_for_a_model_of_text_are_rejected(tmp_path: Path) -> None:
    keys = {k: v for k, v in tree_keys(tmp_path).items() if k != "model.bidirectional"}
    job = write_vlm_job(tmp_path)
    text = job.read_text().replace('name = "vlm"', 'name = "transformer"')
    begin, end = text.index("[model.vision]"), text.index("[data]")
    job.write_text(text[:begin] + text[end:])
    keys.pop("model.modalities.image.first_id")
    with rejects("model.name", ..., "branches", ConfigError):
        fit_alone(job, **keys)


def test_bidirectional_images_are_rejected_over_cp_before_anything_starts(tmp_path: Path) -> None:
    config = load_job(
        write_vlm_job(tmp_path), {"model.bidirectional": "image", "parallel.cp": 2}
    ).config
    problems = layout_problems(config, 2)
    assert any("parallel.cp 2" in str(p) for p in problems)


def captions(folder: Path, count: int, shade: int) -> Path:
    """Captions of COCO: the odd pictures have two."""
    folder.mkdir()
    images, notes = [], []
    for i in range(count):
        Image.new("RGB", (8, 8), (20 * i, shade, 0)).save(folder / f"{i}.png")
        images.append({"id": i, "file_name": f"{i}.png"})
        notes += [{"image_id": i, "caption": "a" * (i + j + 1)} for j in range(1 + i % 2)]
    (folder / "captions.json").write_text(json.dumps({"images": images, "annotations": notes}))
    return folder / "captions.json"


@pytest.mark.slow
def test_loss_of_held_out_captions_is_by_hand_that_of_their_tokens(tmp_path: Path) -> None:
    """In the loop, at each evaluation, on one rank and on two, packed or not: sum over tokens, divided once."""
    keys: dict[str, Any] = {"eval.sequences": 64}
    for key, path in (
        ("sources.squares", captions(tmp_path / "train", 12, 0)),
        ("validation", captions(tmp_path / "held", 7, 200)),
    ):
        source = {"name": "forge_vlm.data:open_source", "path": str(path)}
        keys |= {f"data.{key}.{k}": v for k, v in source.items()}
        keys[f"data.{key}.options"] = {**OPTIONS, "format": "coco", "pack": key == "validation"}
    keys |= {"data.seq_len": 24, "model.max_seq_len": 24, "model.modalities.image.first_id": 257}
    job = write_vlm_job(tmp_path)
    fit_alone(job, **keys)
    logged = [value for value in columns(job)["val_loss"] if value is not None]
    assert len(logged) == 2
    model = load_trained(tmp_path / "run")[0]
    config = SourceConfig(
        "forge_vlm.data:open_source", str(tmp_path / "held/captions.json"),
        options={**OPTIONS, "format": "coco", "pack": False}, split="train",
    )  # fmt: skip
    total, count = 0.0, 0
    stream = open_stream(config, 24)
    assert len(stream) == 10
    for i in range(len(stream)):
        row = stream.arrays(np.array([i]))
        names = ("tokens", "positions", "document_ids", "labels")
        tokens, positions, ids, labels = (torch.as_tensor(row[n]) for n in names)
        with torch.no_grad():
            logits = model(tokens, positions, ids, images=row["images"].values)[0].double()
        for t in range(24):
            if labels[0, t] != -100:
                total -= float(logits[t].log_softmax(-1)[labels[0, t]])
                count += 1
    assert abs(logged[-1] - total / count) <= 1e-5 * logged[-1]
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    fit_on_ranks(2, write_vlm_job(ranks), **flags(keys))
    found = [value for value in columns(ranks / "job.toml")["val_loss"] if value is not None]
    assert np.allclose(found, logged, rtol=1e-4)


@pytest.mark.slow
def test_batches_that_are_drawn_together_are_those_of_the_run(tmp_path: Path) -> None:
    path = str(talks(tmp_path))
    grouped = {**OPTIONS, "pack": False, "group": 12}
    source = {"name": "forge_vlm.data:open_source", "path": path, "options": grouped}
    keys = {f"data.sources.squares.{k}": v for k, v in source.items()}
    keys |= {"data.seq_len": 24, "model.max_seq_len": 24, "model.modalities.image.first_id": 257}
    keys |= {"eval.every_steps": 0, "train.steps": 2}
    keys |= {"train.steps": 8, "checkpoint.every_steps": 4}
    fit_alone(write_vlm_job(tmp_path / "good"), **keys)
    other = write_vlm_job(tmp_path / "other")
    for steps in (4, 8):  # and once again from the checkpoint in the middle of an epoch
        fit_on_ranks(2, other, **flags(keys | {"train.steps": steps}))
    rows = [columns(tmp_path / name / "job.toml")["instances"] for name in ("good", "other")]
    assert rows[0] == rows[1]
    for change in (
        {"train.global_batch": 8},
        {f"data.sources.more.{k}": v for k, v in source.items()},
    ):
        with rejects("data.sources.squares.options.group", 12, kind=ConfigError):
            fit_alone(write_vlm_job(tmp_path / "bad"), **keys | change)

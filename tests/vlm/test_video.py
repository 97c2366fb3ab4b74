"""Clips in files: the frames of the task `motion` come back as they were drawn, and a job trains on them."""

from __future__ import annotations

import csv
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.vlm.tasks import SIDE, Sample, direction_of_motion

from forge_testing.runs import columns, fit_alone
from forge_testing.vlm_jobs import write_vlm_job
from forge_vlm.data import VisionChatSource

pytestmark = pytest.mark.lane("test")

av = pytest.importorskip("av")

WORDS = ["left", "right", "up", "down"]
OPTIONS = {
    "format": "videos",
    "resolution": {"fixed": {"size": SIDE}},
    "tokens_per_tile": 16,
    "template": "plain",
    "video": {"fps": 4.0, "max_frames": 4, "timestamps": False},
}


def write_clips(folder: Path, count: int) -> list[tuple[Sample, str]]:
    """Clips of a moving square without losses, a quarter of a second a frame, and their table of questions."""
    rng, found = np.random.default_rng(3), []
    with (folder / "metadata.csv").open("w", newline="") as table:
        rows = csv.writer(table)
        rows.writerow(["file_name", "question", "answer"])
        for i in range(count):
            sample = direction_of_motion(rng)
            places = [np.argwhere(f[0] > 128).mean(0) for f in (sample.images[0], sample.images[3])]
            down, right = places[1] - places[0]
            answer = WORDS[int(right > 0)] if abs(right) > abs(down) else WORDS[2 + int(down > 0)]
            with av.open(str(folder / f"{i}.mp4"), "w") as container:
                stream = container.add_stream("libx264rgb", rate=4)
                stream.height = stream.width = SIDE
                stream.pix_fmt, stream.options = "rgb24", {"crf": "0"}
                for number, image in enumerate(sample.images):
                    pixels = np.ascontiguousarray(image.transpose(1, 2, 0))
                    frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                    frame.pts, frame.time_base = number, Fraction(1, 4)
                    container.mux(stream.encode(frame))
                container.mux(stream.encode())
            rows.writerow([f"{i}.mp4", "what goes?", answer])
            found.append((sample, answer))
    return found


def test_frames_of_files_are_those_that_were_drawn(tmp_path: Path) -> None:
    drawn = write_clips(tmp_path, 12)
    clips = VisionChatSource(tmp_path, **OPTIONS)  # type: ignore[arg-type]
    for number, (sample, answer) in enumerate(drawn):
        found = clips.sample(number)
        media, good = clips.media(found)
        assert good
        frames = torch.cat([picture["images"] for picture in media])
        assert torch.equal(frames, torch.from_numpy(sample.images))
        said = bytes(t for t in found.labels.tolist() if 0 <= t < 256).decode()
        assert said == answer
    assert {answer for _, answer in drawn} == set(WORDS)


@pytest.mark.slow
def test_a_job_of_clips_trains(tmp_path: Path) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    write_clips(folder, 24)
    source = {"name": "forge_vlm.data:open_source", "path": str(folder), "options": OPTIONS}
    keys = {f"data.sources.squares.{k}": v for k, v in source.items()}
    keys |= {"data.seq_len": 128, "model.max_seq_len": 128, "model.modalities.image.first_id": 257}
    keys |= {"model.vision.vit.image_size": SIDE, "model.vision.vit.patch_size": 8}
    keys |= {"eval.every_steps": 0, "train.steps": 12, "train.global_batch": 8}
    job = write_vlm_job(tmp_path)
    fit_alone(job, **keys)
    losses = columns(job)["loss"]
    assert losses[-1] < 0.8 * losses[0]

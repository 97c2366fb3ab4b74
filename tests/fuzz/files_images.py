"""Files of jobs with images: conversations about small pictures, and documents with discrete tokens of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.axes_images import DISCRETE, PATCH, SIDE, tokens_of_image
from tests.fuzz.job import Job

#: Widths and heights of pictures of an encoder of any sizes.
_SIZES = [(8, 8), (16, 8), (8, 16), (11, 6)]


def write_conversations(
    job: Job, folder: Path, name: str, rows: int, seed: list[int]
) -> dict[str, Any]:
    """Write the pictures and records of a source; its keys."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    options, path = _options(job), folder / f"{name}.jsonl"
    if job["image files"] == "videos":
        path = _write_videos(random, folder)
        options |= {"format": "videos", "video": {"fps": 4.0, "max_frames": 2, "timestamps": False}}
    else:
        _write_records(job, random, path, max(4, rows))
    if job["image files"] == "prepared":
        from forge_vlm.data import options_of
        from forge_vlm.data.prepare import prepare

        prepare(str(path), str(folder / "prepared"), options_of(str(path), options))
        path = folder / "prepared"
    if job["image files"] == "streamed":
        options |= {"streaming": True, "virtual_shards": 3, "shuffle_window": 4}
    return {"name": "vlm", "path": str(path), "options": options}


def _write_records(job: Job, random: np.random.Generator, path: Path, count: int) -> None:
    from PIL import Image

    lines, pictures = [], 0
    for number in range(count):
        parts: list[dict[str, Any]] = [{"type": "text", "text": _text(random, 2)}]
        for _ in range((1, 0, 2)[number % 3]):
            file, size = f"{path.stem}-{pictures}.png", _SIZES[pictures % len(_SIZES)]
            size = size if job["encoder"].startswith("packed_vit") else (SIDE, SIDE)
            pixels = random.integers(0, 256, (*size[::-1], 3)).astype(np.uint8)
            Image.fromarray(pixels).save(path.parent / file)
            parts.append({"type": "image", "image": file})
            pictures += 1
        lines.append(_record(job, random, parts))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _write_videos(random: np.random.Generator, folder: Path) -> Path:
    """Six clips of four frames, a quarter of a second each, and the table of their questions."""
    import av

    lines = ["file_name,question,answer"]
    for number in range(6):
        with av.open(str(folder / f"{number}.mp4"), "w") as container:
            stream = container.add_stream("libx264rgb", rate=4)
            stream.height = stream.width = 4 * SIDE
            stream.pix_fmt, stream.options = "rgb24", {"crf": "0"}
            for _ in range(4):
                pixels = random.integers(0, 256, (4 * SIDE, 4 * SIDE, 3)).astype(np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
        lines.append(f"{number}.mp4,{_text(random, 2)},{_text(random, 3)}")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


def _record(job: Job, random: np.random.Generator, parts: list[dict[str, Any]]) -> dict[str, Any]:
    question = {"role": "user", "content": parts}
    system = {"role": "system", "content": "s"}  # in place of the long one of the template
    asked = [system, question] if job.sizes["template"] == "vicuna" else [question]
    answer = {"role": "assistant", "content": _text(random, 3)}
    if not job.has("branches") or random.integers(2):
        return {"messages": [*asked, answer]}
    other = {"role": "assistant", "content": _text(random, 3)}
    return {"messages": asked, "branches": [[answer], [other]]}


def _text(random: np.random.Generator, most: int) -> str:
    return "".join(random.choice(list("abcdefgh"), int(random.integers(1, most + 1))))


def _options(job: Job) -> dict[str, Any]:
    """Keys of the source."""
    found: dict[str, Any] = {
        "tokenizer": "byte",
        "template": job.sizes["template"],
        "weigh": job["weights of answers"],
        "positions": job["image positions"],
        "bidirectional": job["sees both ways"],
    }
    if job["image rows"] != "packed":
        found["pack"] = False
    if job["image rows"] == "groups":
        found["group"] = job.sizes["global_batch"]
    if not job["encoder"].startswith("packed_vit"):
        return {
            **found,
            "tokens_per_tile": tokens_of_image(job),
            "resolution": {"fixed": {"size": SIDE}},
        }
    merge = 2 if job["encoder"] == "packed_vit, merged" else 1
    side = PATCH * merge
    budget = {"multiple": side, "min_pixels": 2 * side**2, "max_pixels": 8 // merge * side**2}
    return {
        **found,
        **{"patch_size": PATCH, "merge": merge, "patch_time": 1},
        "resolution": {"name": "budget", "budget": budget},
    }


def with_discrete_images(job: Job, tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The tokens of a document, with runs of ids of images."""
    first, vocab = job.sizes["vocab_size"] - DISCRETE, job.sizes["vocab_size"]
    found = 3 + tokens % (first - 3)
    for start in range(int(random.integers(1, 6)), len(found) - 1, 7):
        run = found[start : min(start + 3, len(found) - 1)]
        run[:] = random.integers(first, vocab, len(run))
    return found

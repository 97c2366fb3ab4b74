"""Files of any format become a folder of samples, once: tokenized, with their images checked and copied.

OUTPUT.parts/plan.json       what is prepared; of another plan all parts are removed
OUTPUT.parts/unit-00000.npz  samples of some records
OUTPUT.parts/full/          the output, which is renamed when it is complete
OUTPUT.parts.lock            held by the one that prepares
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from forge_vlm._shared.atomic import install_folder, new_file, restore_folder, write_file
from forge_vlm._shared.hashed_files import HashedFile
from forge_vlm._shared.locks import locked
from forge_vlm._shared.paths import user_path
from forge_vlm._shared.problems import Problem, ProblemError, raise_problems
from forge_vlm._shared.record_keys import RecordKeys
from forge_vlm.data.files import InvalidSample, invalid
from forge_vlm.data.formats import open_records
from forge_vlm.data.options import problems
from forge_vlm.data.prepared import BYTES, FIELDS, MANIFEST, NAMED, VERSION, is_prepared
from forge_vlm.data.records import EncodedImage, Records
from forge_vlm.data.sample import Sample, SampleEncoder
from forge_vlm.data.video import Frame
from forge_vlm.resolution import Layout
from forge_vlm.sequence.plan import IGNORE

__all__ = ["COLUMNS", "encode_chunk", "prepare"]

#: Types of the arrays of a `Sample`, a value of each token.
COLUMNS = {"tokens": "<u4", "labels": "<i4", "weights": "<f4", "branches": "<i4"}


def encode_chunk(
    records: Records, reader: SampleEncoder, numbers: Iterable[int], pictures: str, keys: RecordKeys
) -> dict[str, np.ndarray]:
    """Arrays of the files of `Prepared`, their ends counted from 0, and `counts`, JSON as bytes."""
    samples: list[Sample] = []
    ends: list[tuple[int, int, int]] = []
    places: list[tuple[int, ...]] = []
    caps: list[tuple[int, ...]] = []
    media = bytearray()
    counts: Counter[str] = Counter()
    unread = keys.counts.copy()  # of chunks before

    for number in numbers:
        sample, _ = reader.sample(records[number])
        read = [_content(reader, p, i, counts) for p, i in zip(sample.pictures, sample.layouts)]
        damaged = sum(content is None for content in read)
        if damaged and reader.corrupt == "skip":
            counts["left_out"] += 1
            continue

        counts["masked"] += damaged
        clips = iter(sample.clips)
        for picture, layout, content in zip(sample.pictures, sample.layouts, read):
            clip = min(next(clips) for _ in reader.pictures.grids(layout))  # all are of one
            picture.release()
            named = pictures == "name" and isinstance(picture.content, Path) and content is not None
            content = str(picture.content).encode() if named else content or b""
            media += content
            places.append((NAMED if named else BYTES, len(media), len(content), clip, *layout))
            caps.append(tuple(bound or 0 for bound in picture.caps))

        counts["capped"] += any(any(picture.caps) for picture in sample.pictures)
        counts["branched"] += sample.branches is not None
        if sample.branches is None:
            sample = sample._replace(branches=np.zeros(len(sample.tokens), np.int64))

        samples.append(sample)
        tokens = len(sample.tokens) + (ends[-1][1] if ends else 0)
        ends.append((number, tokens, len(places)))
    for sample in samples:
        labeled = sample.labels != IGNORE
        counts["unlearnt"] += not labeled.any()  # language: key of the manifest
        counts["trained"] += int(labeled.sum())
        counts["weighted"] += bool((sample.weights[labeled] != 1).any())

    columns = {
        name: np.concatenate([getattr(s, name) for s in samples] or [np.zeros(0)]).astype(dtype)
        for name, dtype in COLUMNS.items()
    }
    return {
        **columns,
        "samples": np.array(ends, "<i8").reshape(-1, 3),
        "pictures": np.array(places, "<i8").reshape(-1, FIELDS),
        "caps": np.array(caps, "<i8").reshape(-1, 2),
        "media": np.frombuffer(bytes(media), np.uint8),
        "counts": np.frombuffer(
            json.dumps({**counts, "unread": keys.counts - unread}).encode(), np.uint8
        ),
    }


def _content(
    reader: SampleEncoder, picture: EncodedImage, layout: Layout, counts: Counter[str]
) -> bytes | None:
    """The bytes of an image that can be decoded; None and its cause counted for another, unless `corrupt` is "raise"."""
    cause = "damaged" if isinstance(picture.content, bytes) else "missing"
    try:
        content = reader.pictures.read(picture)
        cause = "damaged"
        if isinstance(picture, Frame):
            content = _smaller(content)
        reader.decode(EncodedImage(picture.name, content, caps=picture.caps), layout)
    except InvalidSample:
        if reader.corrupt == "raise":
            raise
        counts[cause] += 1
        return None
    return content


def _smaller(bitmap: bytes) -> bytes:
    """A frame of a video, compressed without loss."""
    from PIL import Image

    file = io.BytesIO()
    Image.open(io.BytesIO(bitmap)).save(file, "PNG")
    return file.getvalue()


UNIT = 256  # records of a chunk
_UNITS = 2  # raise it where files of chunks have other contents
Progress = Callable[[int, int], None]
_OPEN: dict[str, Any] = {}  # of a worker: records and reader


def prepare(
    path: str | Path,
    output: str | Path,
    options: Mapping[str, Any],
    *,
    pictures: str = "copy",
    overwrite: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the samples of `path` to a folder, and return its manifest.

    `options` are those of `VisionChatSource`, all given. Every image is decoded: a damaged one ends it, or its sample is
    left out or not trained, as `corrupt` says; "skip" leaves out what `VisionChatSource` would mask. images: "copy" writes
    all into the folder, "name" keeps the paths of those in files of their own.

    The folder appears complete or not at all. Killed, the same call goes on from the chunks that are done in
    OUTPUT.parts; two at once wait for one another. `progress(done, units)` is called after each. Memory: a chunk a
    worker. Raises ValueError for options and an output that exists, InvalidSample for files.
    Usage: `prepare("talks.jsonl", "prepared", options_of("talks.jsonl", {"tokens_per_tile": 256}))`.
    """
    output = user_path(output).absolute()
    with _named(output):
        own, is_there = [*_problems(output, pictures, overwrite, workers)], output.exists()
    raise_problems("prepare", [*problems(options), *own])
    given = {name: value for name, value in options.items() if name != "cache"}
    given = json.loads(json.dumps(given))
    path = str(user_path(path).absolute())
    keys = RecordKeys(given["ignore_keys"], given["strict"], InvalidSample)
    records = open_records(given["format"], path, keys=keys, images=given["images"])
    reader = SampleEncoder(given)

    if not len(records):
        rule = "must hold a record to prepare"
        raise invalid("path", "empty", path, rule, "check the path and the format")
    about = {
        "version": VERSION,
        "path": path,
        "content": records.fingerprint(options.get("cache")),
        "options": reader.identity,
        "given": given,
        "pictures": pictures,
        "unit": UNIT,
        "units": _UNITS,
        "records": len(records),
    }

    parts = output.with_name(f"{output.name}.parts")
    if is_there and not overwrite:
        raise _exists(output)

    with _named(output), _alone(output, parts):
        if output.exists() and not overwrite:  # written while this process waited
            raise _exists(output)
        _begin(parts, about)
        _write_units(parts, path, given, pictures, len(records), workers, progress)
        units = [parts / _name(n) for n in range(-(-len(records) // UNIT))]
        about |= {
            "vocab_size": reader.tokens.vocab_size,
            "tokenizer": reader.tokens.spec,
            "image_id": reader.image_id,
        }
        about = _join(units, parts / "whole", about, keys.counts)
        install_folder(parts / "whole", output, replace=overwrite)
        shutil.rmtree(parts)

    return about


def _problems(output: Path, pictures: str, overwrite: bool, workers: int) -> Iterator[Problem]:
    if pictures not in ("copy", "name"):
        yield Problem("pictures", "unknown", pictures, "must be 'copy' or 'name'", "use 'copy'")
    if not 1 <= workers <= 1024:
        yield Problem("workers", "range", workers, "must be from 1 to 1024", "use 1")
    if overwrite and output.exists() and (output.is_symlink() or not is_prepared(output)):
        rule = "must be a folder of prepared samples to be overwritten"
        yield Problem("output", "foreign", str(output), rule, "choose another")


def _exists(output: Path) -> Any:
    fix = "choose another name, or replace it with overwrite=True (--overwrite)"
    return invalid("output", "exists", str(output), "is there already", fix, kind=ProblemError)


@contextlib.contextmanager
def _alone(output: Path, parts: Path) -> Iterator[None]:
    """Hold the lock, after a wait where another process has it, and give back an output whose replacement was killed."""

    def wait(owner: str) -> None:
        print(f"forge-vlm: waiting for {owner}, which prepares {output}", file=sys.stderr)

    output.parent.mkdir(parents=True, exist_ok=True)
    # next to the parts, which are removed at the end: a lock that goes with them would exclude no process
    with locked(parts.with_name(f"{parts.name}.lock"), wait=wait, remove=True):
        parts.mkdir(exist_ok=True)
        restore_folder(output)
        yield


@contextlib.contextmanager
def _named(output: Path) -> Iterator[None]:
    """Errors of the file system name the output, or the file of another place."""
    try:
        yield
    except OSError as error:
        where = str(error.filename or output)
        if not (where.startswith(str(output)) or str(output).startswith(where)):
            raise
        rule, fix = f"cannot be written ({error.strerror})", "choose a folder with room that can"
        raise invalid("output", "unwritable", str(output), rule, fix, kind=ProblemError) from error


def _name(unit: int) -> str:
    return f"unit-{unit:05}.npz"


def _begin(parts: Path, about: Mapping[str, Any]) -> None:
    """Keep the chunks of a call that was killed, if it prepared the same; remove all else."""
    plan, said = parts / "plan.json", json.dumps(about, sort_keys=True)
    if not plan.exists() or plan.read_text() != said:
        for file in parts.glob("unit-*"):
            file.unlink()
        write_file(plan, said)
    shutil.rmtree(parts / "whole", ignore_errors=True)


def _write_units(
    parts: Path,
    path: str,
    given: dict[str, Any],
    pictures: str,
    count: int,
    workers: int,
    progress: Progress | None,
) -> None:
    """Write the chunks that are not there, in this process or in several."""
    total = -(-count // UNIT)
    left = [n for n in range(total) if not (parts / _name(n)).exists()]
    done = total - len(left)
    jobs = [(parts / _name(n), n * UNIT, min(count, (n + 1) * UNIT)) for n in left]
    arguments = path, given, pictures

    with contextlib.ExitStack() as stack:
        each: Callable[..., Any] = map
        if workers > 1 and len(jobs) > 1:
            count = min(workers, len(jobs))
            pool = ProcessPoolExecutor(count, get_context("spawn"), _open_files, arguments)
            stack.callback(pool.shutdown, cancel_futures=True)
            each = pool.map
        else:
            stack.callback(_OPEN.clear)
            _open_files(*arguments)

        try:
            for _ in each(_write_unit, jobs):
                done += 1
                if progress is not None:
                    progress(done, total)
        except BrokenProcessPool as error:
            rule = "ended: a process of the pool was killed, mostly for its memory"
            fix = "the same command goes on from what is done; use fewer workers"
            raise invalid("workers", "killed", workers, rule, fix, where=path) from error


def _open_files(path: str, given: dict[str, Any], pictures: str) -> None:
    keys = RecordKeys(given["ignore_keys"], given["strict"], InvalidSample)
    records = open_records(given["format"], path, keys=keys, images=given["images"])
    _OPEN.update(records=records, reader=SampleEncoder(given), pictures=pictures, keys=keys)


def _write_unit(job: tuple[Path, int, int]) -> None:
    file, first, stop = job
    found = encode_chunk(**_OPEN, numbers=range(first, stop))
    with new_file(file) as opened:
        np.savez(opened, allow_pickle=False, **found)


def _join(
    units: list[Path], folder: Path, about: dict[str, Any], unread: Counter[str]
) -> dict[str, Any]:
    """Write chunks one after the other, with ends counted from the first, and the manifest; `unread` keys were counted when
    the files were opened."""
    folder.mkdir()
    files = {
        name: HashedFile(folder / f"{name}.bin")
        for name in (*COLUMNS, "samples", "pictures", "caps", "media")
    }
    totals: Counter[str] = Counter()

    for unit in units:
        with np.load(unit) as found:
            samples, pictures = found["samples"], found["pictures"]
            samples[:, 1] += totals["tokens"]
            samples[:, 2] += totals["pictures"]
            pictures[:, 1] += totals["media"]
            arrays = {**found, "samples": samples, "pictures": pictures}
            for name, file in files.items():
                file.write(arrays[name].tobytes())

            totals["tokens"] += len(arrays["tokens"])
            totals["pictures"] += len(pictures)
            totals["media"] += len(arrays["media"])
            totals["samples"] += len(samples)
            counts = json.loads(arrays["counts"].tobytes())
            unread.update(counts.pop("unread"))
            totals.update(counts)

    if not totals["samples"]:
        rule = f"has no sample left, as a picture of each of {about['records']} records is damaged"
        raise invalid("", "no_sample", ..., rule, "restore them", where=about["path"])
    columns, branched = dict(COLUMNS), bool(totals.pop("branched"))
    if not branched:
        files.pop("branches").close()
        (folder / "branches.bin").unlink()
        del columns["branches"]

    if not totals.pop("capped"):
        files.pop("caps").close()
        (folder / "caps.bin").unlink()

    about |= {
        "columns": columns,
        "samples": totals.pop("samples"),
        "tokens": totals["tokens"],
        "weighted": bool(totals.pop("weighted")),
        "branched": branched,
        "unlearnt": totals.pop("unlearnt"),  # language: key of the manifest
        "trained": totals.pop("trained"),
        "unread": dict(unread),
        "counts": dict(totals),
        "bytes": {f"{name}.bin": file.size for name, file in files.items()},
        "sha256": {f"{name}.bin": file.finish() for name, file in files.items()},
    }
    write_file(folder / MANIFEST, json.dumps(about, indent=2))

    return about

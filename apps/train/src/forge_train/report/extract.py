"""Activations of a run's checkpoint on its held-out rows, as one .npz file.

What is computed lies in parts beside the file until all are there, so that memory holds one batch, and a command that
was killed goes on by itself. The finished file has the same bytes then.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import tyro
from torch import nn

from forge_core.interp import ActivationStore, points_of
from forge_data import Batch, Stream, batch_of
from forge_parallel import select_device
from forge_resilience import ExitCode
from forge_train.config.schema import JobConfig
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import ConfigError, StateError, config_errors
from forge_train.jobs import load_model
from forge_train.report.evaluate import evaluation_job
from forge_train.trainer.build import open_held_out
from forge_train.trainer.run_directory import RunDirectory

__all__ = ["extract_run", "run_extract"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_OF_ROWS = ("tokens", "positions", "document_ids")
_REQUEST = "request.json"


def run_extract(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="folder of a run")],
    /,
    points: Annotated[
        tuple[str, ...], tyro.conf.arg(help="patterns of points, such as 'layers.*.resid_post'")
    ] = (),
    output: Annotated[Path | None, tyro.conf.arg(help="the .npz file to write")] = None,
    rows: Annotated[int, tyro.conf.arg(help="rows of the set, fewer if it has not as many")] = 64,
    batch: Annotated[int, tyro.conf.arg(help="rows that are computed at once")] = 8,
    set_name: Annotated[
        str, tyro.conf.arg(name="set", help="'validation', or a name of [eval.sets]")
    ] = "validation",
    step: Annotated[
        int | None, tyro.conf.arg(help="step of the checkpoint (default: the newest good one)")
    ] = None,
    dtype: Annotated[str, tyro.conf.arg(help="of the file: 'fp32' or 'fp16'")] = "fp32",
    device: Annotated[str, tyro.conf.arg(help="'auto', 'cpu' or 'cuda'")] = "auto",
) -> int:
    """Write activations of a checkpoint on held-out rows, in one process with fp32 weights; go on if it was killed.

    Without --points it prints the points of the model.
    """
    if not points:
        with config_errors():
            model, _, _ = load_model(run, "cpu", step)
            print("\n".join(points_of(model)))
        return ExitCode.DONE
    if output is None:
        raise ConfigError(["--output must name the file to write; give --output activations.npz"])
    at, count = extract_run(
        run, points, output, rows, batch, set_name, step=step, dtype=dtype, device=device
    )
    print(f"{output}: {count} rows of {set_name} at step {at}")
    return ExitCode.DONE


def extract_run(
    run: str | Path,
    points: tuple[str, ...],
    output: str | Path,
    rows: int = 64,
    batch: int = 8,
    set_name: str = "validation",
    *,
    step: int | None = None,
    dtype: str = "fp32",
    device: str = "auto",
) -> tuple[int, int]:
    """(step, rows) of an .npz file with the points (see `forge_core.interp.points`) of the first `rows` rows of a set.

        extract_run("runs/mine", ("layers.*.resid_post",), "stream.npz", rows=256)
        numpy.load("stream.npz")["layers.3.resid_post"]     # (256, S, M)

    The file has the rows' tokens, positions and document_ids (rows, S), too, and `meta`, a text of JSON. Memory and the
    time lost by a kill are those of `batch` rows; the disk holds twice the file while it is put together. The run is read
    only. Raises ConfigError, DataError or StateError.
    """
    out = Path(output)
    problems = [
        f"--{n} {v} must be 1 or more" for n, v in (("rows", rows), ("batch", batch)) if v < 1
    ]
    if out.suffix != ".npz":
        problems.append(f"--output {out} must end in .npz; rename it")
    if dtype not in _DTYPES:
        problems.append(f"--dtype {dtype} must be one of {', '.join(_DTYPES)}")
    if out.exists():
        problems.append(f"--output {out} exists already; name another file, or remove it")
    if problems:
        raise ConfigError(problems)
    with config_errors():
        where = select_device(device)
    model, _, at = load_model(run, where, step)
    with config_errors(), ActivationStore(points).watch(model):
        pass  # each pattern has its points
    stream = _stream(run, model, batch, set_name)
    count = min(rows, len(stream))
    # all that the parts depend on; a run that went on has another step
    request = {"run": str(Path(run).resolve()), "step": at, "set": set_name, "points": list(points)}
    request |= {"rows": count, "batch": batch, "dtype": dtype}
    parts = _folder_of_parts(out, request)
    for ids in (range(i, min(i + batch, count)) for i in range(0, count, batch)):
        part = parts / f"rows-{ids.start:09d}.npz"
        if not part.exists():
            _write_part(part, _values(model, batch_of(stream, ids), points, dtype, where))
    _join(parts, out, json.dumps(request))
    return at, count


def _stream(run: str | Path, model: nn.Module, batch: int, set_name: str) -> Stream:
    job = evaluation_job(RunDirectory(run), None, batch)
    _refuse_images(job, run)
    found = {
        key.rpartition(".")[2]: s
        for key, s in open_held_out(job, model, job.parallel.axes(1)).items()
    }
    if set_name not in found:
        names = ", ".join(found) or "none"
        raise ConfigError(
            [f"--set {set_name} must be a set that {run} evaluates: {names}; name one of them"]
        )
    return found[set_name]


def _refuse_images(job: JobConfig, run: str | Path) -> None:
    if isinstance(job.model, VLMModelConfig):
        raise ConfigError(
            [
                f"{run} is of a model with images, whose rows have no one shape; use forge_core.interp on it"
            ]
        )


def _values(
    model: nn.Module, batch: Batch, points: tuple[str, ...], dtype: str, device: torch.device
) -> dict[str, numpy.ndarray]:
    """What a part holds, by name."""
    store = ActivationStore(points, dtype=_DTYPES[dtype])
    with config_errors(), torch.no_grad(), store.watch(model):
        ids, positions = batch.tokens.to(device), batch.positions.to(device)
        model(ids, positions=positions, document_ids=batch.document_ids)
    found = {name: store[name].numpy() for name in store.names}
    return found | {name: getattr(batch, name).numpy() for name in _OF_ROWS}


def _folder_of_parts(out: Path, request: dict[str, Any]) -> Path:
    """The folder beside `out`, new or of the same request; StateError for parts of another one."""
    parts = out.with_name(out.name + ".parts")
    asked = parts / _REQUEST
    if asked.exists():
        before = json.loads(asked.read_text())
        other = next((key for key in request if before.get(key) != request[key]), None)
        if other is not None:
            raise StateError(
                [
                    f"{parts} holds parts of another command ({other} {before.get(other)!r}, now {request[other]!r}); give "
                    "that command again, or remove the folder"
                ]
            )
        return parts
    parts.mkdir(parents=True, exist_ok=True)
    temporary = asked.with_suffix(".tmp")
    temporary.write_text(json.dumps(request))
    os.replace(temporary, asked)
    return parts


def _write_part(path: Path, values: dict[str, numpy.ndarray]) -> None:
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        numpy.savez(file, **values)  # type: ignore[arg-type, unused-ignore]
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _join(parts: Path, out: Path, meta: str) -> None:
    """One file of all parts, array by array, part by part; then the parts go."""
    files = sorted(parts.glob("rows-*.npz"))
    temporary = parts / "all.tmp"
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        with numpy.load(files[0]) as first:
            shapes = {name: (first[name].shape[1:], first[name].dtype) for name in first.files}
        rows = sum(len(values) for values in _each(files, "tokens"))
        for name, (shape, dtype) in shapes.items():
            _write_array(archive, name, (rows, *shape), dtype, files)
        with archive.open(_entry("meta"), "w") as file:
            numpy.lib.format.write_array(file, numpy.array(meta))
    with open(temporary, "rb") as written:
        os.fsync(written.fileno())
    os.replace(temporary, out)
    shutil.rmtree(parts)


def _write_array(
    archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], dtype: Any, files: list[Path]
) -> None:
    header = {
        "descr": numpy.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    with archive.open(_entry(name), "w", force_zip64=True) as file:
        numpy.lib.format.write_array_header_2_0(file, header)  # type: ignore[no-untyped-call, unused-ignore]
        for values in _each(files, name):
            if values.shape[1:] != shape[1:]:
                raise StateError(
                    [
                        f"{name} has rows of {values.shape[1:]} and {shape[1:]}, which are no one array"
                    ]
                )
            file.write(numpy.ascontiguousarray(values).tobytes())


def _each(files: list[Path], name: str) -> Iterator[numpy.ndarray]:
    for path in files:
        with numpy.load(path) as part:
            yield part[name]


def _entry(name: str) -> zipfile.ZipInfo:
    """Without a time, so that the same values are the same file."""
    return zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))

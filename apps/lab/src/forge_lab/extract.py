"""`forge-train extract`: activations of a run's checkpoint on held-out sequences, as one .npz or a folder of safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import tyro
from torch import nn

from forge_core.interp import ActivationStore, points_of
from forge_data import Batch, Stream, batch_of
from forge_lab._renamed import renamed_argument
from forge_lab._shared.problems import Problem, invalid
from forge_lab.activation_files import Parts, output_problems
from forge_lab.evaluate import Axes, checked_job, world_of
from forge_parallel import Meshes, ParallelConfig, World, find_world
from forge_parallel.compute import Compute
from forge_parallel.points import UnshardedPoints
from forge_resilience import Agreement, ExitCode
from forge_train import JobConfig, load_model
from forge_train.errors import ConfigError, DataError, config_errors, refuse, run_on_all_ranks
from forge_train.toolkit import init_ranks, job_compute, open_held_out
from forge_vlm import VLMConfig

_DTYPES = {"fp32": numpy.float32, "fp16": numpy.float16}
_FIELDS = ("tokens", "positions", "document_ids")


@dataclass(frozen=True)
class ExtractFlags:
    """The arguments of `forge-train extract`."""

    run: tyro.conf.Positional[Path]
    """folder of a run"""
    points: tuple[str, ...] = ()
    """patterns of hook points, such as 'layers.*.resid_post'"""
    output: Path | None = None
    """the .npz file to write, or a folder for safetensors"""
    rows: int = 64
    """sequences of the set, at most as many as it has"""
    batch_size: int = 8
    """sequences that a data rank computes at once"""
    set_name: Annotated[str, tyro.conf.arg(name="set")] = "validation"
    """'validation', or a name of [eval.sets]"""
    step: int | None = None
    """step of the checkpoint; without it the newest good one"""
    dtype: str = "fp32"
    """of the file: 'fp32' or 'fp16'"""
    shard_mib: int = 256
    """most MiB of a file in a folder"""
    device: str = "auto"
    """'auto', 'cpu' or 'cuda'"""
    parallel: Axes = field(default_factory=Axes)
    nproc: int | None = None
    """processes on this machine that divide the work; without it one, or those of a launcher"""

    def check(self, nproc: int) -> None:
        """Raise ConfigError for what keeps `nproc` processes from it, before any of them starts."""
        self.require_output()
        layout = self.parallel.parallel(self.device)
        _job(self, layout, World(world_size=nproc, local_world_size=nproc))

    def require_output(self) -> None:
        """Raise ConfigError unless points and an output are given."""
        if self.points and self.output:
            return
        key, rule = "--output" if self.points else "--points", "must be given to write activations"
        fix = "give --points 'layers.*.resid_post' --output activations.npz, or neither, in one process, to list the points"
        raise invalid(key, "missing", ..., rule, fix, kind=ConfigError)

    def problems(self) -> Iterator[Problem]:
        """Problems of values out of range, and of the output."""
        for name in ("rows", "batch_size", "shard_mib"):
            if (value := getattr(self, name)) < 1:
                yield Problem(f"--{name}", "range", value, "must be 1 or more")
        if self.dtype not in _DTYPES:
            yield Problem("--dtype", "unknown", self.dtype, f"must be one of {', '.join(_DTYPES)}")
        yield from output_problems(self.output or Path())


def run_extract(flags: ExtractFlags) -> int:
    """Write activations of a checkpoint on held-out sequences with fp32 weights, in one process or as one rank of many.

    Without points and output it prints the hook points of the model.
    """
    with config_errors():
        world = find_world()
    if not flags.points and flags.output is None and world.world_size == 1:
        with config_errors():
            model, _, _ = load_model(flags.run, "cpu", flags.step)
            print("\n".join(points_of(model)))
        return ExitCode.DONE

    parallel = flags.parallel.parallel(flags.device)
    flags.require_output()
    at, count = _extract(flags, parallel, None)
    if world.rank == 0:
        print(f"{flags.output}: {count} rows of {flags.set_name} at step {at}")
    return ExitCode.DONE


@renamed_argument("batch", "batch_size")
def extract_run(
    run: str | Path,
    points: tuple[str, ...],
    output: str | Path,
    rows: int = 64,
    batch_size: int = 8,
    set_name: str = "validation",
    *,
    step: int | None = None,
    dtype: str = "fp32",
    shard_mib: int = 256,
    device: str = "auto",
    parallel: ParallelConfig | None = None,
    meshes: Meshes | None = None,
) -> tuple[int, int]:
    """Write the points (see `forge_core.interp.points`) of the first `rows` sequences of a set; return (step, rows).

        extract_run("runs/mine", ("layers.*.resid_post",), "stream.npz", rows=256)
        numpy.load("stream.npz")["layers.3.resid_post"]     # (256, S, M)

    The file also has tokens, positions and document_ids of the sequences, (rows, S), and `meta`, a text of JSON. An output
    without suffix is a folder of safetensors of at most `shard_mib` MiB each, with the same arrays of some sequences, and
    index.json, which lists arrays, shards and the first sequence of each.

    Under torchrun, srun or RANK/WORLD_SIZE each rank calls it; `parallel` is their layout, by default data ranks.
    `meshes` are the meshes of `parallel` where a group runs already. Each data rank computes `batch_size` sequences at
    once (under pp that many for each stage); the first of its ranks writes them, and rank 0 the file, so all ranks must
    see the folder of the output. Values are those of one process up to the order of sums.

    Memory, and the time lost by a kill, are those of `batch_size` sequences, and of a shard; the disk holds twice the
    output while it is put together. The same command after a kill goes on to the same bytes. The run is only read.
    Raises ConfigError, DataError or StateError.
    """
    asked = ExtractFlags(
        Path(run), tuple(points), Path(output), rows, batch_size, set_name, step, dtype, shard_mib
    )
    return _extract(asked, parallel or Axes().parallel(device), meshes)


def _extract(
    asked: ExtractFlags, parallel: ParallelConfig, meshes: Meshes | None
) -> tuple[int, int]:
    job = _job(asked, parallel, world_of(meshes))
    with init_ranks(parallel) if meshes is None else nullcontext(meshes) as ranks:
        return _write(asked, job, ranks)


def _job(asked: ExtractFlags, parallel: ParallelConfig, world: World) -> JobConfig:
    """The job of these ranks. ConfigError for flags, a run or a layout that do not fit."""
    refuse(list(asked.problems()))
    job = checked_job(asked.run, None, asked.batch_size, parallel, world)
    if isinstance(job.model, VLMConfig):
        rule = "is a run of a model with images, whose sequences have different shapes"
        fix = "use forge_core.interp on it"
        raise invalid("run", "images", str(asked.run), rule, fix, kind=ConfigError)
    return job


def _write(asked: ExtractFlags, job: JobConfig, meshes: Meshes) -> tuple[int, int]:
    """Compute and write all batches that are not there yet, then the output. Collective."""
    model, _, at = load_model(
        asked.run, meshes.device, asked.step, parallel=job.parallel, meshes=meshes
    )
    agreement = Agreement(meshes.host_group, alone=meshes.world_size == 1)
    stream = run_on_all_ranks(agreement, lambda: _stream(asked, job, model, meshes))
    with config_errors():
        compute = job_compute(model, job, meshes)
        unsharded = UnshardedPoints(model, job.parallel, meshes)
        with ActivationStore(asked.points, whole=unsharded).watch(model):
            pass  # raises for a pattern without a point

    count = min(asked.rows, len(stream))
    with closing(Parts(asked.output or Path())) as parts:
        request = _request(asked, job, meshes, at, count)
        run_on_all_ranks(agreement, lambda: parts.open(request) if meshes.rank == 0 else None)
        done = run_on_all_ranks(agreement, parts.starts)  # before any rank writes another

        starts, readers = range(0, count, compute.sequences_at_once), meshes.batch_size
        for first in range(0, len(starts), readers):
            missing = [start for start in starts[first : first + readers] if start not in done]
            if not missing:
                continue
            # collectives pair up: a rank without a batch of its own computes another rank's too
            start = missing[min(meshes.batch_rank, len(missing) - 1)]
            stop = min(start + compute.sequences_at_once, count)
            padding = [start] * (compute.sequences_at_once - (stop - start))
            batch = batch_of(stream, [*range(start, stop), *padding])
            values = _values(compute, batch, asked, unsharded)
            values = {name: value[: count - start] for name, value in values.items()}

            writes = meshes.is_batch_leader and meshes.batch_rank < len(missing)
            write = partial(_write_part, parts, start, values, asked) if writes else lambda: None
            run_on_all_ranks(agreement, write)
        most = asked.shard_mib * 2**20
        run_on_all_ranks(agreement, lambda: parts.join(most) if meshes.rank == 0 else None)
    return at, count


def _write_part(
    parts: Parts, start: int, values: dict[str, numpy.ndarray], asked: ExtractFlags
) -> None:
    """Write values (rows, ...); DataError for one that the file's dtype cannot hold."""
    floats = (name for name, value in values.items() if value.dtype == numpy.float32)
    with numpy.errstate(over="ignore"):
        narrow = {name: values[name].astype(_DTYPES[asked.dtype]) for name in floats}

    for name, value in narrow.items():
        if (numpy.isinf(value) & numpy.isfinite(values[name])).any():
            largest = f"{numpy.abs(values[name]).max():.6g}"
            rule = f"cannot hold {largest} of {name}: it ends at 65504"
            raise invalid("--dtype", "range", asked.dtype, rule, "use --dtype fp32", kind=DataError)
    parts.write(start, values | narrow)


def _request(
    asked: ExtractFlags, job: JobConfig, meshes: Meshes, at: int, count: int
) -> dict[str, Any]:
    """Everything that the values depend on; `step` changes while the run trains."""
    usual = asdict(ParallelConfig(precision="fp32"))
    layout = {k: v for k, v in asdict(job.parallel).items() if v != usual[k] and k != "device"}
    return {
        "run": str(asked.run.resolve()),
        "step": at,
        "set": asked.set_name,
        "points": list(asked.points),
        "rows": count,
        "batch": asked.batch_size,
        "dtype": asked.dtype,
        "ranks": meshes.world_size,
        "parallel": layout,
    }


def _stream(asked: ExtractFlags, job: JobConfig, model: nn.Module, meshes: Meshes) -> Stream:
    layout = job.parallel.axes(meshes.world_size)
    found = {key.rpartition(".")[2]: s for key, s in open_held_out(job, model, layout).items()}
    if asked.set_name not in found:
        names = ", ".join(found) or "none"
        rule, fix = f"must be a set that {asked.run} evaluates: {names}", "name one of them"
        raise invalid("--set", "unknown", asked.set_name, rule, fix, kind=ConfigError)
    return found[asked.set_name]


def _values(
    compute: Compute, batch: Batch, asked: ExtractFlags, unsharded: UnshardedPoints
) -> dict[str, numpy.ndarray]:
    """Arrays of a batch, by name: the hook points, and the fields of the sequences."""
    store = ActivationStore(asked.points, dtype=torch.float32, whole=unsharded)
    with config_errors(), store.watch(compute.model):
        compute.forward(batch)
    found = {name: store[name].numpy() for name in sorted(store.names)}
    return found | {name: getattr(batch, name).numpy() for name in _FIELDS}

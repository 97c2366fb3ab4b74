"""``average``, ``prune``, ``reshard``, ``convert``: the verbs that write, tensor by tensor."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

from forge_ckpt import directories
from forge_ckpt._shared.bars import progress_bar
from forge_ckpt._shared.problems import Problem, Shown, invalid
from forge_ckpt.dcp import convert_from_dcp, convert_to_dcp
from forge_ckpt.dcp.convert import METADATA
from forge_ckpt.directories import Lock
from forge_ckpt.errors import CorruptCheckpoint
from forge_ckpt.manifest import Manifest
from forge_ckpt.read.tensors import SavedTensors
from forge_ckpt.retention import Keep, Retention
from forge_ckpt.verbs.look import (
    SAME,
    CheckpointPath,
    StepNumber,
    StorePath,
    chosen,
    print_json,
    print_line,
    steps_of,
    verified,
)
from forge_ckpt.write.writer import Box, write_checkpoint

_Checkpoints = Annotated[
    tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT CHECKPOINT ...")
]
_Out = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]


def average(
    checkpoints: _Checkpoints,
    /,
    out: Path,
    weights: tuple[float, ...] | None = None,
    json: bool = False,
) -> int:
    """Average the numbers of checkpoints; the result is a step of the store OUT, that of the last one.

    Tensors of floating and complex dtypes are averaged in float64 and cast back; those of other dtypes, and all
    objects, are the last one's. Memory: one tensor, once in float64.

    Args:
        checkpoints: two or more of one model: steps, or stores, whose newest is taken.
        out: the directory of the new store.
        weights: one for each checkpoint; they are divided by their sum.
        json: print one JSON object.
    """
    shares = _shares(len(checkpoints), weights)
    with ExitStack() as stack:
        opened = [stack.enter_context(SavedTensors(path)) for path in checkpoints]
        last = opened[-1].table
        for other in opened[:-1]:
            _refuse_other_tensors(other, opened[-1])

        def mean(name: str) -> Tensor:
            dtype = last.tensors[name].dtype
            if not (dtype.is_floating_point or dtype.is_complex):
                return opened[-1].read(name)
            wide = torch.complex128 if dtype.is_complex else torch.float64
            total = torch.zeros(last.tensors[name].shape, dtype=wide)
            for share, saved in zip(shares, opened):
                total.add_(saved.read(name).to(wide), alpha=share)
            return total.to(dtype)

        boxes = (Box.whole(entry.path, mean(name)) for name, entry in last.tensors.items())
        return _write(out, last, [boxes], json)


def reshard(source: CheckpointPath, out: _Out, /, ranks: int, json: bool = False) -> int:
    """Rewrite a checkpoint as M ranks would save it: M files, each tensor cut along its first dim.

    A load needs no such thing (any number of ranks loads any checkpoint); fewer, larger files are faster to
    copy, and more of them to read in parallel. The content stays equal. Memory: the part of one tensor.

    Args:
        source: a step, or a store, whose newest is taken.
        out: the directory of the new store.
        ranks: the number of files.
        json: print one JSON object.
    """
    if ranks < 1:
        raise invalid("ranks", "range", ranks, "must be at least 1", "use 1")
    with SavedTensors(source) as saved:
        table = saved.table

        def part(rank: int) -> Iterator[Box]:
            for name, entry in table.tensors.items():
                rows = entry.shape[0] if entry.shape else 1
                step = max(1, math.ceil(rows / ranks))  # as Shard(0) of torch cuts
                start, stop = min(rank * step, rows), min((rank + 1) * step, rows)
                if start == stop and rank:
                    continue
                offsets = (start, *(0 for _ in entry.shape[1:]))[: len(entry.shape)]
                sizes = (stop - start, *entry.shape[1:])[: len(entry.shape)]
                yield Box(entry.path, entry.shape, offsets, saved.read_box(name, offsets, sizes))

        return _write(out, table, [part(rank) for rank in range(ranks)], json)


def prune(
    directory: StorePath,
    /,
    last: int = 3,
    every: int = 0,
    best: str | None = None,
    mode: Literal["min", "max"] = "min",
    milestones: str | None = None,
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Remove the checkpoints of DIR that no rule keeps, after the newest was verified.

    Args:
        directory: the directory of the checkpoints of a run; no job may be writing to it.
        last: keep so many of the newest.
        every: keep multiples of it.
        best: keep the best by this metric, of those that were saved with it.
        mode: whether the best has the lowest or the highest value.
        milestones: powers_of_2, or module:attr of a function of the step.
        dry_run: print what would be removed, and remove nothing.
        json: print one JSON object.
    """
    retention = Retention(directory, Keep(last, every, best, mode, milestones))
    steps_of(directory)
    lock = None if dry_run else Lock(directory)

    try:
        steps, newest = directories.committed_steps(directory), chosen(directory, None)
        try:
            old = retention.outdated_by(newest)
            path = directories.step_directory(directory, newest)
            if old and not dry_run and (found := verified(path, newest)[1]):
                raise found
        except CorruptCheckpoint as error:
            untouched = Problem("", "newest", ..., "is corrupt, and nothing was removed")
            raise CorruptCheckpoint([*error.problems, untouched], error.where) from None

        if not dry_run:
            retention.remove(old)
            old = [step for step in old if step not in directories.list_steps(directory)]
    finally:
        if lock is not None:
            lock.release()

    kept = [step for step in steps if step not in old]
    if json:
        print_json({"kept": kept, "removed": old, "dry_run": dry_run})
    else:
        verb = "would be removed" if dry_run else "removed"
        print(f"{verb}: {', '.join(map(str, old)) or 'none'}")
        print(f"kept: {', '.join(map(str, kept)) or 'none'}")
    return SAME


def convert(
    source: CheckpointPath,
    out: _Out,
    /,
    to: Literal["forge", "dcp"] = "forge",
    step: StepNumber = None,
    without: tuple[str, ...] = (),
    optimizer: Literal["positions", "names"] = "positions",
    json: bool = False,
) -> int:
    """Make a step of the store OUT from a checkpoint of torch's dcp.save, or the other way round.

    Of a foreign directory nothing is unpickled but tensors and plain values, by torch.load(weights_only=True).

    Args:
        source: with --to forge the directory that holds .metadata; with --to dcp a step or a store.
        out: the directory of the store, or of the new DCP checkpoint.
        to: forge reads a checkpoint of torch.distributed.checkpoint, dcp writes one.
        step: the number of the step (forge); without it that at the end of the name of the source.
        without: patterns of names to leave out (forge), such as 'dataloader.*'.
        optimizer: number the parameters of a torch optimizer, as torch.optim does, or keep their names (forge).
        json: print one JSON object.
    """
    if to == "dcp" and (step is not None or without or optimizer != "positions"):
        rule = "takes no --step, --without and --optimizer, which are for --to forge"
        raise invalid("to", "excludes", to, rule, "leave them out")
    with progress_bar("convert") as bar:
        if to == "dcp":
            convert_to_dcp(source, out, bar)
            target = out
        else:
            by_position = optimizer == "positions"
            target = convert_from_dcp(source, out, step, without, by_position, bar)
    _say(target, json, _others(source) if to == "forge" else [])
    return SAME


def _shares(count: int, weights: Sequence[float] | None) -> list[float]:
    """The weights of an average, divided by their sum."""
    if count < 2:
        raise invalid("checkpoints", "length", count, "must be at least two to average", "give two")
    found = [1.0] * count if weights is None else list(weights)
    total = sum(found)
    if len(found) != count or not math.isfinite(total) or total == 0:
        rule = f"must be {count} numbers with a sum other than 0"
        raise invalid("weights", "sum", found, rule)
    return [weight / total for weight in found]


def _refuse_other_tensors(other: SavedTensors, last: SavedTensors) -> None:
    """Raise ValueError for a tensor that only one of two checkpoints has, or that has another shape or dtype."""
    a, b = ({n: (e.shape, e.dtype) for n, e in s.table.tensors.items()} for s in (other, last))
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            shown, there = Shown(_described(a.get(name))), _described(b.get(name))
            rule = f"in {other.path} must be {there}, as in {last.path}"
            raise invalid(name, "mismatch", shown, rule, "average checkpoints of one model")


def _described(entry: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "not there" if entry is None else f"{entry[0]} {entry[1]}"


def _write(out: Path, table: Manifest, contents: list[Iterator[Box]], json: bool) -> int:
    """Write the tensors and the objects of ``table`` as a step of the store ``out``, and print its path."""
    if table.step is None:
        rule = "is not in the checkpoint"
        raise invalid("step", "missing", ..., rule, "save it through a Store")
    total = sum(chunk.length for entry in table.tensors.values() for chunk in entry.chunks)
    with progress_bar("write") as bar:
        target = write_checkpoint(
            out,
            table.step,
            contents,
            table.objects,
            digest=table.digest,
            progress=lambda done: bar(done, total),
        )
    _say(target, json)
    return SAME


def _others(source: Path) -> list[str]:
    """Files beside a checkpoint of DCP, such as a train_state.pt: other programs' state, often pickled."""
    names = (path.name for path in source.iterdir())
    return sorted(n for n in names if n != METADATA and not n.endswith(".distcp"))


def _say(target: Path, json: bool, not_read: Sequence[str] = ()) -> None:
    """Print what was written, and the files of the source that were not read."""
    if json:
        print_json({"written": str(target), **({"not_read": not_read} if not_read else {})})
    else:
        print_line(f"written: {target}")
        if not_read:
            print_line(f"not read, as DCP does not list them: {', '.join(not_read)}")

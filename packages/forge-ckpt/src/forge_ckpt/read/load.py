"""All ranks load one checkpoint, or verify it: no state changes before every rank has verified."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from forge_ckpt import codec, files, manifest
from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.problems import invalid
from forge_ckpt.errors import CheckpointMismatch, StateRefused, is_problem_error, one_line, restated
from forge_ckpt.files import Directory
from forge_ckpt.protocols import Stateful
from forge_ckpt.rank_group import RankGroup
from forge_ckpt.read.blocks import verify_files
from forge_ckpt.read.planner import (
    NO_TARGET,
    ForgeLoadPlanner,
    check_object,
    check_state,
    is_stateful,
    load_target,
    unselected_names,
)
from forge_ckpt.read.reader import ForgeReader, Staged, fill, metadata_of
from forge_ckpt.read.tensors import step_path

Check = Callable[[int, Mapping[str, Any]], None]


def load_step(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    check: Check | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> int | None:
    """Fill ``state`` from one checkpoint, and from no other; returns its step.

        load_step("runs/trunk/checkpoints/step-00001200", {"model": model, "optimizer": optimizer})

    For a run that begins where another one stood: a ``Store`` would fall back to an older step. ``path`` is a
    step or a store, whose newest step is read; nothing there is locked, changed or moved, and other
    entries of what was saved are left alone. ``state``, ``check`` and ``group`` as in ``Store.load``: any
    layout of ranks, and every rank verifies before the first tensor of any rank changes.

    Raises CorruptCheckpoint and CheckpointMismatch with ``state`` unchanged on all ranks, ValueError for a path
    without a checkpoint, and what a ``load_state_dict`` raises, after which ``state`` is of no use; as it is
    when a file was damaged between its verification and its read.
    """
    ranks = RankGroup(group)
    ranks.run_on_all_ranks(lambda: check_state(state))
    chosen = Path(ranks.run_on_rank_0(lambda: str(step_path(user_path(path)))))
    try:
        return load_checkpoint(ranks, chosen, None, state, min(4, os.cpu_count() or 1), check)
    except StateRefused as error:
        raise_cause(ranks, error, "")
        raise


def load_checkpoint(
    group: RankGroup,
    path: Path,
    step: int | None,
    state: MutableMapping[str, Any],
    threads: int,
    check: Check | None = None,
) -> int | None:
    """Fill ``state`` of every rank from ``path``, whose step must be ``step`` (None: any); returns it.

    Raises CorruptCheckpoint or CheckpointMismatch on all ranks, and then no tensor of any rank has
    changed, unless a file was damaged between its verification and its read. If a ``load_state_dict`` raises at the end, states have changed: all ranks raise
    StateRefused for a built-in exception about values, and other exceptions unchanged.

    Communication: the manifest from rank 0, then three all-gathers of 8 bytes a rank: whether each rank could plan, has
    verified, and has filled its state. Each rank reads and verifies the blocks that its own boxes touch.
    """
    table = broadcast_manifest(group, path, step)
    planner = ForgeLoadPlanner()
    reader = ForgeReader(path, step=step, threads=threads)
    content: dict[str, Any] = {}

    def plan() -> Any:
        metadata = metadata_of(table, without=unselected_names(state, table))
        targets = {name: load_target(value, name, table) for name, value in state.items()}
        content.update({name: t for name, t in targets.items() if t is not NO_TARGET})
        extra = [k for k, p in metadata.planner_data.items() if targets.get(p[0]) is NO_TARGET]
        if extra:
            rule = "is in the checkpoint only, and nothing here has such state"
            fix, kind = "build the same objects as the run that saved it", CheckpointMismatch
            raise invalid(one_line(extra[0]), "unclaimed", ..., rule, fix, where=path, kind=kind)
        planner.set_up_planner(content, metadata, group.rank == 0)
        try:
            return planner.create_local_plan()
        except CheckpointMismatch as error:
            raise restated(error, path, CheckpointMismatch) from None

    def stage() -> Staged:
        reader.use(open_on_rank(group, path), table)
        in_place = reader.stage(wanted, planner)
        # The saved state in new containers, for the checks: the caller's containers must not change yet.
        saved = planner.replace_leaves(codec.copy_containers(content))
        for name, value in state.items():
            with _value_errors_as_corruption(f"{path}: {name}"):
                check_object(value, name, saved.get(name, {}))
        if check is not None:
            with _value_errors_as_corruption(str(path)):
                check(-1 if table.step is None else table.step, saved)
        return in_place

    def apply() -> None:
        fill(staged, planner)
        for name, value in list(state.items()):
            if is_stateful(value):
                _load(value, content.get(name, {}), f"{path}: {name}")
            elif content[name] is not value:
                state[name] = content[name]

    # Each call is a vote: if any rank raised, all raise here. The state changes in the last one only,
    # so a rank with a damaged file stops all others before their tensors change.
    try:
        wanted = group.run_on_all_ranks(plan)
        staged = group.run_on_all_ranks(stage)
        group.run_on_all_ranks(apply)
    finally:
        reader.close()
    return table.step


def raise_cause(group: RankGroup, refused: StateRefused, note: str) -> None:
    """Raise the exception of ``load_state_dict`` on its ranks, its nearest built-in base elsewhere."""

    def raise_it() -> None:
        cause: BaseException | None = refused
        while isinstance(cause, StateRefused):
            cause = cause.__cause__
        if cause is not None:
            cause.add_note(f"{refused}{note}")
            raise cause

    group.run_on_all_ranks(raise_it)


@contextlib.contextmanager
def _value_errors_as_corruption(where: str) -> Iterator[None]:
    """A plain ValueError of a check, also with problems. Subclasses mean other data, or another model."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError and not is_problem_error(error):
            raise
        raise restated(error, where) from error


def _load(value: Stateful, content: Any, where: str) -> None:
    """``load_state_dict``; a built-in exception about values becomes StateRefused."""
    try:
        value.load_state_dict(content)
    except Exception as error:
        # The caller may catch a class of the object's own. OSError and MemoryError are faults of the
        # host: an older checkpoint would not help.
        about_values = type(error).__module__ == "builtins" or is_problem_error(error)
        if not about_values or isinstance(error, OSError | MemoryError):
            raise
        raise StateRefused(
            f"{where}: load_state_dict raised {type(error).__name__}: {error}"
        ) from error


def verify_checkpoint(
    group: RankGroup, path: Path, step: int, threads: int, seconds: float = 0.0
) -> None:
    """Compare a whole checkpoint with its digests; all ranks raise CorruptCheckpoint, or none.

    ``seconds``: see :class:`forge_ckpt.files.Directory`.
    """
    table = broadcast_manifest(group, path, step, seconds)

    def verify() -> None:
        names = sorted(table.files, key=lambda name: (len(name), name))
        # No rank reads the file that it wrote: it would be read from the host's page cache, not from disk.
        share = [name for i, name in enumerate(names) if (i + 1) % group.size == group.rank]
        with open_on_rank(group, path, seconds) as directory:
            verify_files(directory, table, share, threads)

    group.run_on_all_ranks(verify)


def open_on_rank(group: RankGroup, path: Path, seconds: float = 0.0) -> Directory:
    """The directory of a checkpoint of which rank 0 has read the manifest and seen all files.

    Network file systems show new names late to other hosts: other ranks wait for a missing one before it counts as
    corrupt. With ``seconds`` all ranks wait, and it never does (:class:`forge_ckpt.files.Directory`).
    """
    if seconds:
        return Directory(path, seconds)
    return Directory(path, files.VISIBLE_SECONDS if group.rank else 0.0, late_is_corrupt=True)


def broadcast_manifest(
    group: RankGroup, path: Path, step: int | None, seconds: float = 0.0
) -> manifest.Manifest:
    """The verified manifest. Only rank 0 reads it, so that all ranks have the same one.

    Rank 0 also compares the sizes of all files with it. Raises as :func:`forge_ckpt.manifest.read`.
    """

    own: list[manifest.Manifest] = []  # of rank 0, which need not decode it again

    def read() -> str:
        with Directory(path, seconds) as directory:
            data = manifest.read_bytes(directory)
            own.append(manifest.check(data, directory, step))
            return data.decode()

    text = group.run_on_rank_0(read)
    return own[0] if own else manifest.decode(text.encode(), str(path / manifest.NAME))

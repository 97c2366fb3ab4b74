"""One checkpoint read by all ranks: verified by each, agreed by all, only then used."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from forge_ckpt import manifest, tree
from forge_ckpt.errors import CheckpointMismatch, CorruptCheckpoint, StateRefused
from forge_ckpt.files import Directory
from forge_ckpt.ranks import Ranks
from forge_ckpt.read.blocks import verify_files
from forge_ckpt.read.planner import ForgeLoadPlanner
from forge_ckpt.read.reader import ForgeReader, Staged, fill, metadata_of
from forge_ckpt.read.targets import NOTHING, check_object, is_stateful, not_asked, target_of

Check = Callable[[int, Mapping[str, Any]], None]


def read_together(
    ranks: Ranks,
    path: Path,
    step: int,
    state: MutableMapping[str, Any],
    threads: int,
    check: Check | None = None,
) -> None:
    """Fill ``state`` of every rank from ``path``.

    Raises CorruptCheckpoint or CheckpointMismatch on all ranks, and then no tensor of any rank has
    changed. If a ``load_state_dict`` raises at the end, states have changed: all ranks raise
    StateRefused, or what was raised where that is not a built-in exception about values.

    Communication: the manifest from rank 0, then three votes of 8 bytes a rank. Each rank reads
    and verifies the blocks that its own boxes touch.
    """
    table = share_manifest(ranks, path, step)
    planner = ForgeLoadPlanner()
    reader = ForgeReader(path, step=step, threads=threads)
    content: dict[str, Any] = {}

    def plan() -> Any:
        metadata = metadata_of(table, without=not_asked(state, table))
        targets = {name: target_of(value, name, table) for name, value in state.items()}
        content.update({name: t for name, t in targets.items() if t is not NOTHING})
        left = [k for k, p in metadata.planner_data.items() if targets.get(p[0]) is NOTHING]
        if left:
            raise CheckpointMismatch(
                f"{path}: {left[0]} is in the checkpoint only, and nothing here has such state; build the "
                "same objects as the run that saved it"
            )
        planner.set_up_planner(content, metadata, ranks.rank == 0)
        try:
            return planner.create_local_plan()
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"{path}: {error}") from None

    def stage() -> Staged:
        reader.use(Directory(path), table)
        try:
            found = reader.stage(wanted, planner)
        finally:
            reader.close()
        saved = planner.place_into(tree.copied(content))
        for name, value in state.items():
            with _value_error_is_corruption(f"{path}: {name}"):
                check_object(value, name, saved.get(name, {}))
        if check is not None:
            with _value_error_is_corruption(str(path)):
                check(step, saved)
        return found

    def use() -> None:
        fill(staged, planner)
        for name, value in list(state.items()):
            if is_stateful(value):
                _load(value, content.get(name, {}), f"{path}: {name}")
            elif content[name] is not value:
                state[name] = content[name]

    wanted = ranks.all_do(plan)
    staged = ranks.all_do(stage)
    ranks.all_do(use)


@contextlib.contextmanager
def _value_error_is_corruption(where: str) -> Iterator[None]:
    """A check's plain ValueError. Its subclasses say something else (other data, another model)."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise CorruptCheckpoint(f"{where}: {error}") from error


def _load(value: Any, content: Any, where: str) -> None:
    try:
        value.load_state_dict(content)
    except Exception as error:
        # a class of the object's own has a meaning to its caller; disk and memory are no values
        about_values = type(error).__module__ == "builtins"
        if not about_values or isinstance(error, OSError | MemoryError):
            raise
        raise StateRefused(
            f"{where}: load_state_dict raised {type(error).__name__}: {error}"
        ) from error


def verify_together(ranks: Ranks, path: Path, step: int, threads: int) -> None:
    """Compare a whole checkpoint with its digests; all ranks raise CorruptCheckpoint, or none.

    The files are dealt out so that no rank reads the one that it would write: its page cache would
    answer, and not the disk.
    """
    table = share_manifest(ranks, path, step)

    def verify() -> None:
        names = sorted(table.files, key=lambda name: (len(name), name))
        mine = [name for i, name in enumerate(names) if (i + 1) % ranks.size == ranks.rank]
        with Directory(path) as directory:
            verify_files(directory, table, mine, threads)

    ranks.all_do(verify)


def share_manifest(ranks: Ranks, path: Path, step: int) -> manifest.Manifest:
    """The verified manifest, read by rank 0 alone, so that no two ranks could read different ones.

    Rank 0 also compares the sizes of all files with it. Raises as :func:`forge_ckpt.manifest.read`.
    """

    def read() -> str:
        with Directory(path) as directory:
            manifest.read(directory, step)
            return manifest.read_bytes(directory).decode()

    text = ranks.first_does(read)
    return manifest.decode(text.encode(), str(path / manifest.NAME))

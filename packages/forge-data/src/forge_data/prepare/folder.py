"""The folder next to the output that keeps finished chunks: a plan, a file for each chunk, the tokenizer.

OUTPUT.parts.lock       held by work on the full output, shared by shards
OUTPUT.parts.lock-3     held by shard 3
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forge_data._shared.atomic import remove, restore_folder, sync_folder, write_file
from forge_data._shared.locks import Held, holder, locked
from forge_data._shared.paths import files_named
from forge_data._shared.problems import invalid
from forge_data.config import SPLITS
from forge_data.errors import InvalidData, invalid_data
from forge_data.prepare.chunks import ChunkFile, Counts, chunk_path
from forge_data.prepare.plan import Chunk, Plan, read_plan
from forge_data.tokens.format import (
    SIDECAR,
    STATISTICS,
    TOKENIZER,
    digest_of,
    read_statistics,
    write_json,
)

__all__ = ["ChunkFolder"]

_PLAN, _FINISHED = "plan.json", "finished.json"
_LOCK = "lock"  # in the folder, where versions before 0.2 had it


class ChunkFolder:
    """The folder `OUTPUT.parts`. Usage: `parts = ChunkFolder(output); parts.begin(plan, None)`."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.folder = output.with_name(output.name + ".parts")
        # Next to the folder, so that one `unlink` is the very last step of all.
        self._finished = self.folder.with_name(f"{self.folder.name}.{_FINISHED}")

    def begin(self, plan: Plan, tokenizer: Path | None) -> None:
        """Make the folder; keep the plan and a copy of the tokenizer in it.

        Chunks of another plan stay until the end: those that both have are used.
        """
        _make_folder(self._output, self.folder)
        self._finished.unlink(missing_ok=True)
        if tokenizer is not None:
            write_file(self.folder / TOKENIZER, tokenizer.read_bytes())
        write_json(self.folder / _PLAN, plan.to_json())

    @contextmanager
    def locked_for(self, shard: int | None) -> Iterator[None]:
        """Hold the locks of a shard, or of the full output, and restore an output if the run that replaced it was killed.

        Shards share the folder with each other, not with work on the full output. The locks are next to it, and go
        with the work; that of the folder with work on the full output. Raises ValueError naming who works there. File
        systems without locks are not guarded, with a warning.
        """
        _make_folder(self._output, self.folder.parent)
        with ExitStack() as after, ExitStack() as held:
            try:
                exclusive = shard is None
                held.enter_context(locked(self._lock(), shared=not exclusive, remove=exclusive))
                if not exclusive:
                    held.enter_context(locked(self._lock(shard), remove=True))

            except Held as error:
                owner = self._owner(shard) or error.owner
                rule = f"must be used by one command at a time, and {owner} writes there"
                fix = "wait for it, or end it"
                raise invalid("", "locked", ..., rule, fix, where=self.folder) from None

            # a killed run may have moved the old output aside
            if exclusive:
                restore_folder(self._output)
            try:
                yield
            finally:
                if exclusive:
                    after.callback(self._end)

    def _end(self) -> None:
        """Remove an empty folder, and then the mark, the last step of all."""
        with suppress(OSError):
            self.folder.rmdir()
        if not self.folder.exists():
            self._finished.unlink(missing_ok=True)

    def _lock(self, shard: int | None = None) -> Path:
        return self.folder.with_name(
            f"{self.folder.name}.lock" + ("" if shard is None else f"-{shard}")
        )

    def _owner(self, shard: int | None) -> str | None:
        """The owner of the lock that is held: those that share a lock are not named in it."""
        shards = files_named(self.folder.parent, f"{self._lock().name}-")
        return next(
            filter(None, map(holder, shards if shard is None else [self._lock(shard)])), None
        )

    def begun(self) -> bool:
        """Whether an earlier run left something."""
        return any(os.path.lexists(path) for path in (self.folder, self._finished))

    def check_folder(self) -> None:
        """Raise ValueError for a .parts folder that prepare did not make."""
        if self._finished.exists() or not os.path.lexists(self.folder):
            return
        # Another shard may be at its first files, so that there is no plan yet.
        first = (_PLAN, TOKENIZER, _LOCK, f".{_PLAN}.", f".{TOKENIZER}.")
        if self.folder.is_symlink() or not (
            self.folder.is_dir()
            and (
                (self.folder / _PLAN).exists()
                or all(path.name.startswith(first) for path in self.folder.iterdir())
            )
        ):
            rule = "must not be something else: chunks wait there for the output"
            raise invalid("", "foreign", ..., rule, "choose another output", where=self.folder)

    def check_same(self, plan: Plan) -> None:
        """Raise ValueError, naming what differs, for another plan where shards share the folder."""
        there = read_plan(self.folder / _PLAN)
        if there is not None and there != plan and plan.shards > 1:
            rule = "are not what it was begun with"
            fix = "give all shards the same command, or remove the folder to begin again"
            raise invalid("", "mismatch", _differences(there, plan), rule, fix, where=self.folder)

    def plan(self) -> Plan:
        """The plan of shards. Raises InvalidData without one."""
        plan = read_plan(self.folder / _PLAN)
        if plan is None:
            fix = "check the output's path"
            if self._output.is_dir():
                fix = f"{self._output} is there already: look at it with `forge-data inspect`"
            rule = "must hold the parts that `forge-data prepare --shard` wrote, but has no plan"
            raise invalid_data("", "no_plan", ..., rule, fix, where=self.folder)
        return plan

    def tokenizer(self, plan: Plan) -> dict[str, Any]:
        """The tokenizer's spec, with the path of the copy. Raises InvalidData if that is another file."""
        spec = plan.settings.tokenizer
        if spec["name"] != "json":
            return spec
        copy = self.folder / TOKENIZER
        if not copy.is_file() or digest_of(copy) != spec["fingerprint"]:
            rule = "must be the tokenizer with which the chunks were made"
            fix = "copy the original there"
            raise invalid_data("", "tokenizer", ..., rule, fix, where=copy)
        return {**spec, "path": str(copy)}

    def sort_out(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], Counts]:
        """Return the chunks that are still to be done, and the counts of the finished ones.

        A damaged file is removed.
        """
        waiting, done = [], Counts(0, 0, 0)
        for chunk in chunks:
            try:
                file = ChunkFile(self.folder, chunk)
            except FileNotFoundError:
                waiting.append(chunk)
            except InvalidData:
                chunk_path(self.folder, chunk).unlink()
                waiting.append(chunk)
            else:
                done += Counts(chunk.size, file.num_documents, file.num_tokens)
        return waiting, done

    def check_complete(self, plan: Plan) -> None:
        """Raise InvalidData naming the shards of which chunks are missing."""
        missing = {
            shard: sum(
                not chunk_path(self.folder, chunk).is_file() for chunk in plan.of_shard(shard)
            )
            for shard in range(plan.shards)
        }
        late = [f"{shard}/{plan.shards} ({n} chunks)" for shard, n in missing.items() if n]
        if late:
            more = f" and {len(late) - 8} more" if len(late) > 8 else ""
            rule = f"lacks chunks of shard {', '.join(late[:8])}{more}"
            fix = "run `forge-data prepare` with these --shard again, and then merge"
            raise invalid_data("", "incomplete", ..., rule, fix, where=self.folder)

    def mark_finished(self, plan: Plan, folder: Path) -> None:
        """Record what `folder` holds; it is about to become the output."""
        mark = self.folder / _FINISHED
        write_json(mark, [_digest(plan), _digests(folder)])
        mark.rename(self._finished)
        sync_folder(self.folder.parent)

    def finished(self, plan: Plan | None = None) -> dict[str, Any] | None:
        """The statistics of the output if it was made from these chunks (and `plan`) by a run that was killed right
        after; else None."""
        if not (self._finished.is_file() and (self._output / STATISTICS).is_file()):
            return None
        of_plan, digests = json.loads(self._finished.read_text(encoding="utf-8"))
        if plan is not None and of_plan != _digest(plan):
            return None
        return read_statistics(self._output) if digests == _digests(self._output) else None

    def holds_more_than(self, plan: Plan) -> bool:
        """Whether there is something to go on from: some chunks are done, of several."""
        return len(plan.chunks) > 1 and any(self.folder.glob("*.unit"))

    def clear(self) -> None:
        """Remove the folder."""
        remove(self.folder)


def _make_folder(output: Path, folder: Path) -> None:
    """Make `folder`, and those above it. Raises ValueError that names the output if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"must be in a folder that can be written ({error.strerror})"
        raise invalid("output", "unwritable", str(output), rule, "choose another") from None


def _digest(plan: Plan) -> str:
    return hashlib.sha256(json.dumps(plan.to_json()).encode()).hexdigest()


def _digests(folder: Path) -> dict[str, str]:
    """sha256 of the sidecars and of the statistics, by their names below `folder`."""
    names = [STATISTICS, SIDECAR, *(f"{split}/{SIDECAR}" for split in SPLITS)]
    return {name: digest_of(folder / name) for name in names if (folder / name).is_file()}


def _differences(there: Plan, plan: Plan) -> list[str]:
    """What differs between two plans."""
    before, now = _flat(asdict(there.settings)), _flat(asdict(plan.settings))
    names = [
        f"{key} ({_short(before.get(key))}, now {_short(now.get(key))})"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
    if there.shards != plan.shards:
        names.append(f"shards ({there.shards}, now {plan.shards})")
    return names or [f"inputs ({_changed_inputs(there, plan)})"]


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by key, those of the tokenizer by `tokenizer.key`."""
    tokenizer = {f"tokenizer.{key}": value for key, value in settings["tokenizer"].items()}
    return {**tokenizer, **{key: value for key, value in settings.items() if key != "tokenizer"}}


def _short(value: object) -> str:
    """A value, of a digest the first digits."""
    text = str(value)
    return text[:12] if len(text) == 64 else text[:40]


def _changed_inputs(there: Plan, plan: Plan) -> str:
    """The first files that differ between two plans of one command, and how."""
    before, now = (
        {r.path: r.state for chunk in p.chunks for r in chunk.ranges} for p in (there, plan)
    )
    changed = [f"{path} is gone" for path in before if path not in now]
    changed += [f"{path} is new" for path in now if path not in before]
    changed += [
        f"{path} is of another size or time"
        for path in now
        if before.get(path, now[path]) != now[path]
    ]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return (", ".join(changed[:3]) or "in another order") + more

"""`prepare` and `merge`: text files to a folder of token files, in memory that does not grow with their size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from forge_data._shared.atomic import new_folder
from forge_data._shared.paths import user_path
from forge_data._shared.problems import Problem, ProblemError, invalid, raise_problems
from forge_data.config import SPLITS
from forge_data.kinds import TextConfig, path_problems
from forge_data.prepare.assemble import assemble
from forge_data.prepare.chunks import Counts
from forge_data.prepare.folder import ChunkFolder
from forge_data.prepare.plan import Plan, Settings, make_plan
from forge_data.prepare.read import find_inputs, not_read
from forge_data.prepare.workers import run_chunks
from forge_data.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    describe_ends,
    document_tokenizer,
    load_tokenizer,
)
from forge_data.tokens.format import SIDECAR, TOKENIZER

__all__ = ["Prepared", "Progress", "merge", "prepare"]

_log = logging.getLogger("forge_data")


class Progress(NamedTuple):
    """How far `prepare` is: `stage` is "tokenize" or "merge", `done` of `total` are bytes of the inputs."""

    stage: str
    done: int
    total: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`: tokens and documents per split ("train" alone without validation).

    `statistics` is the content of statistics.json. Of a shard the one split is "shard I/N", and there are
    no statistics before the merge. `ends` describes which tokens begin and end a document, and why.
    """

    output: Path
    num_tokens: dict[str, int]
    num_documents: dict[str, int]
    statistics: dict[str, Any] = field(default_factory=dict)
    ends: str = ""


def _silent(progress: Progress) -> None:
    pass


def prepare(
    inputs: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: str = "byte",
    eos: str | None = None,
    bos: str | None = None,
    validation_every: int = 0,
    validation_fraction: float = 0.0,
    deduplicate: bool = False,
    document: str = "file",
    text_field: str = "text",
    ignore_keys: Sequence[str] = (),
    strict: bool = False,
    overwrite: bool = False,
    workers: int = 1,
    shard: tuple[int, int] | None = None,
    progress: Callable[[Progress], None] = _silent,
) -> Prepared:
    """Tokenize files and folders (or one of them) into `output`, which appears complete or not at all.

    Each document stands between the tokens that begin and end a text by the tokenizer's files, or `bos` and `eos`: names
    of tokens, or "" for none. A tokenizer without an end, or with several, is an error without `eos`. With
    `validation_every` N, every N-th document is written to `output/validation`, the others to
    `output/train`; `validation_fraction` does the same by a digest of the text, so that it depends neither
    on order nor on shards; with neither all go to `output` itself. `deduplicate` drops each document whose
    text an earlier one has. `document` says what a document of a text file is: the "file", a "line",
    or what stands between blank lines ("blank_line").
    Of records whose other keys hold what would be lost (media, messages, weights) those in `ignore_keys` are left out, and
    others are an error; with `strict` any other key is.

    Chunks of up to 64 MB are tokenized into `OUTPUT.parts`, by `workers` processes; a prepare that was
    killed goes on from those that are done. `shard` (I, N) does the I-th of N parts of them (from 0), in a
    folder that N jobs may share, and leaves the output to `merge`. The bytes of the output depend on none of
    these, nor on kills.

    Memory of each worker is some MB plus, for JSON tokenizers, the longest document; `deduplicate` takes 8
    bytes a document, and about 60 for each that has a copy. Disk: the tokens twice until the end. Raises
    ValueError for arguments and InvalidData for the content of files; then `output` is as it was, and
    `OUTPUT.parts` is kept only where several chunks were planned and some are done.
    Usage: `prepare(["books"], "tokens/books", validation_every=20)`.
    """
    listed = [inputs] if isinstance(inputs, str | Path) else inputs
    paths, target = [user_path(p) for p in listed], user_path(output)
    problems: list[Problem] = []
    for key, path in [*(("inputs", p) for p in listed), ("output", output)]:
        problems += path_problems(path, key)
        if path == "":
            rule = "must name something, and would be the current folder"
            problems.append(Problem(key, "empty", path, rule, "name it (is a variable empty?)"))

    problems += _split_problems(validation_every, validation_fraction)
    problems += _work_problems(workers, shard)
    if not paths:
        rule = "must name at least one file or folder"
        problems.append(Problem("inputs", "missing", ..., rule, "name one"))
    text = (tokenizer, eos, bos, document, text_field, validation_every, ignore_keys, strict)
    try:
        TextConfig(*text)  # type: ignore[arg-type]
    except ProblemError as error:
        problems += error.problems
    raise_problems("", problems)

    encoder = document_tokenizer(tokenizer, eos, bos)
    ends = describe_ends(encoder)
    settings = Settings(
        _portable(encoder.spec()),
        encoder.vocab_size,
        document,
        text_field,
        validation_every,
        validation_fraction,
        deduplicate,
        sorted(ignore_keys),
        strict,
    )

    files = find_inputs(paths)
    for line in filter(None, (not_read(path) for path in paths if path.is_dir())):
        _log.warning("%s", line)
    plan = make_plan(files, settings, 1 if shard is None else shard[1])

    work = ChunkFolder(target.absolute())
    if not work.begun():
        # before anything is made, so that an error leaves nothing
        _check_output(target, paths, overwrite)
    work.check_folder()

    with work.locked_for(None if shard is None else shard[0]):
        if shard is None and (statistics := work.finished(plan)) is not None:
            work.clear()
            return _prepared(target, statistics, ends)
        _check_output(target, paths, overwrite)

        work.check_same(plan)
        with _kept_if_useful(work, plan):
            work.begin(plan, encoder.path if isinstance(encoder, JsonTokenizer) else None)

            mine = list(plan.chunks) if shard is None else plan.of_shard(shard[0])
            if shard is not None and not mine:
                words = "shard %d/%d has nothing to do, as the text is %d chunk%s of work"
                many = "s" * (len(plan.chunks) != 1)
                _log.warning(words, *shard, len(plan.chunks), many)
            done = _tokenize(work, plan, mine, encoder, workers, progress)
            if shard is not None:
                name = f"shard {shard[0]}/{shard[1]}"
                return Prepared(work.folder, {name: done.tokens}, {name: done.documents}, {}, ends)
            return _finish(work, plan, target, progress, ends)


def merge(
    output: str | Path,
    *,
    overwrite: bool = False,
    progress: Callable[[Progress], None] = _silent,
) -> Prepared:
    """Write `output` from the shards that `prepare(..., shard=(I, N))` left in `OUTPUT.parts`.

    The output is that of one `prepare` without shards, byte for byte. Costs one read and write of all
    tokens; memory as for `prepare`. Raises InvalidData, naming the shards that are not complete, and
    ValueError for an output that exists. Usage: `merge("tokens/books")`.
    """
    target = user_path(output)
    raise_problems("", path_problems(target, "output"))
    work = ChunkFolder(target.absolute())
    if not work.begun():
        work.plan()  # raises, as there is no plan to read
    work.check_folder()
    with work.locked_for(None):
        if (statistics := work.finished()) is not None:
            work.clear()
            return _prepared(target, statistics)
        plan = work.plan()
        _check_output(target, [Path(r.path) for u in plan.chunks for r in u.ranges], overwrite)
        work.check_complete(plan)
        ends = describe_ends(load_tokenizer(work.tokenizer(plan)))
        return _finish(work, plan, target, progress, ends)


def _tokenize(
    work: ChunkFolder,
    plan: Plan,
    chunks: Sequence[Any],
    encoder: ByteTokenizer | JsonTokenizer,
    workers: int,
    progress: Callable[[Progress], None],
) -> Counts:
    """Write the chunks that are not there; returns the counts of all."""
    waiting, before = work.sort_out(chunks)
    total, last = sum(chunk.size for chunk in chunks), before

    def report(counts: Counts) -> None:
        nonlocal last
        last = before + counts
        progress(Progress("tokenize", last.size, total, last.documents, last.tokens))

    report(Counts(0, 0, 0))  # finished chunks: rates count from them
    run_chunks(waiting, work.folder, encoder, plan.settings, workers, report)
    return last


def _finish(
    work: ChunkFolder, plan: Plan, target: Path, progress: Callable[[Progress], None], ends: str
) -> Prepared:
    """Write the output from complete chunks, and remove them."""
    total = sum(chunk.size for chunk in plan.chunks)
    progress(Progress("merge", 0, total, 0, 0))
    with new_folder(target, replace=True, place=work.folder) as folder:
        statistics = assemble(
            plan,
            work.folder,
            folder,
            work.tokenizer(plan),
            lambda c: progress(Progress("merge", c.size, total, c.documents, c.tokens)),
        )
        work.mark_finished(plan, folder)
    work.clear()
    return _prepared(target, statistics, ends)


def _prepared(target: Path, statistics: dict[str, Any], ends: str = "") -> Prepared:
    splits = statistics["splits"]
    return Prepared(
        target,
        {split: found["tokens"] for split, found in splits.items()},
        {split: found["documents"] for split, found in splits.items()},
        statistics,
        ends,
    )


@contextmanager
def _kept_if_useful(work: ChunkFolder, plan: Plan) -> Iterator[None]:
    """After an error, keep the chunks only where the next run can use them."""
    try:
        yield
    except BaseException:
        if plan.shards > 1 or work.holds_more_than(plan):
            _log.warning(
                "chunks that are done stay in %s; the same command goes on from them", work.folder
            )
        else:
            work.clear()
        raise


def _check_output(output: Path, inputs: Sequence[Path], overwrite: bool) -> None:
    """Raise ValueError if `output` exists, unless it holds token files and `overwrite` is True."""
    if not (output.exists() or output.is_symlink()):
        return
    name, other = str(output), "choose another output"
    if not overwrite:
        rule = "must not exist yet"
        fix = f"{other}, or replace it with overwrite=True (--overwrite)"
        raise invalid("output", "exists", name, rule, fix)
    folders = [output, *(output / split for split in SPLITS)]
    if output.is_symlink() or not any((folder / SIDECAR).is_file() for folder in folders):
        rule = "must be a folder of token files to be overwritten"
        raise invalid("output", "no_tokens", name, rule, other)
    inside = [i for i in inputs if i.resolve().is_relative_to(output.resolve())]
    if inside:
        rule = f"must not be in the output {output}, which would be replaced"
        raise invalid("inputs", "inside", str(inside[0]), rule, other)


def _portable(spec: dict[str, Any]) -> dict[str, Any]:
    """A spec with the name of the tokenizer's copy for its path."""
    return {**spec, "path": TOKENIZER} if "path" in spec else spec


def _split_problems(validation_every: int, validation_fraction: float) -> Iterator[Problem]:
    if not 0 <= validation_fraction < 1:
        rule = "must be from 0 (none) to under 1"
        yield Problem("validation_fraction", "range", validation_fraction, rule, "use 0.05")
    if validation_every and validation_fraction:
        rule = f"must not be given with validation_every {validation_every}"
        yield Problem("validation_fraction", "excludes", validation_fraction, rule, "remove one")


def _work_problems(workers: int, shard: tuple[int, int] | None) -> Iterator[Problem]:
    if workers < 1:
        yield Problem("workers", "range", workers, "must be at least 1", "use the number of cores")
    if shard is not None and not 0 <= shard[0] < shard[1]:
        rule, fix = "must be I/N with I from 0 to N-1", f"use 0/{max(1, shard[1])}"
        yield Problem("shard", "range", shard, rule, fix)

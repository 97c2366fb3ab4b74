"""`prepare`: text files to a folder of token files, in memory that does not grow with their size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_data._problems import path_problems
from forge_data.config import SPLITS
from forge_data.errors import InvalidData
from forge_data.prepare.output import check_output, replacing
from forge_data.prepare.readers import DOCUMENT_KINDS, Piece, find_inputs, read_pieces
from forge_data.prepare.token_writer import TokenWriter
from forge_data.protocols import Tokenizer
from forge_data.tokenizer import ByteTokenizer, JsonTokenizer


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`: tokens and documents per split ("train" alone without validation)."""

    output: Path
    num_tokens: dict[str, int]
    num_documents: dict[str, int]


def prepare(
    inputs: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: str = "byte",
    eos: str | None = None,
    validation_every: int = 0,
    document: str = "file",
    text_field: str = "text",
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Prepared:
    """Tokenize text files and folders (or one of them) into `output`, which appears complete or not at all.

    Each document is followed by the tokenizer's end-of-document token, where it has one. With
    `validation_every` N, every N-th document is written to `output/validation`, the others to
    `output/train`; with 0 all go to `output` itself. `document` is the unit in .txt and .md files:
    "file", "line" or "blank_line". `progress` is called with (bytes read, bytes in all). Memory is
    about a MB plus, for JSON tokenizers, the longest document. Raises ValueError for arguments and
    InvalidData for the content of files; then nothing on disk has changed.
    Usage: `prepare(["books"], "tokens/books", validation_every=20)`.
    """
    listed = [inputs] if isinstance(inputs, str | Path) else inputs
    paths, target = [Path(p) for p in listed], Path(output)
    _check_arguments(paths, target, document, validation_every, tokenizer, eos)
    encoder: Tokenizer = ByteTokenizer() if tokenizer == "byte" else JsonTokenizer(tokenizer, eos)
    files = find_inputs(paths)
    check_output(target, paths, overwrite)
    with replacing(target) as folder:
        folders = {s: folder / s for s in SPLITS} if validation_every else {"train": folder}
        writers = {
            split: TokenWriter(path, encoder.vocab_size, encoder.spec())
            for split, path in folders.items()
        }
        try:
            pieces = _read(files, document, text_field, progress)
            _refuse_empty(writers, _write(pieces, encoder, writers, validation_every))
            for writer in writers.values():
                writer.finish()
        finally:
            for writer in writers.values():
                writer.close()
    return Prepared(
        target,
        {split: writer.num_tokens for split, writer in writers.items()},
        {split: writer.num_documents for split, writer in writers.items()},
    )


def _check_arguments(
    inputs: Sequence[Path],
    output: Path,
    document: str,
    validation_every: int,
    tokenizer: str,
    eos: str | None,
) -> None:
    problems = [p for path in [*inputs, output] for p in path_problems(path)]
    if not inputs:
        problems.append("inputs must name at least one file or folder; name one")
    if document not in DOCUMENT_KINDS:
        problems.append(
            f"document {document!r} must be one of {', '.join(DOCUMENT_KINDS)}; use file"
        )
    if validation_every < 0 or validation_every == 1:
        problems.append(
            f"validation_every {validation_every} must be 0 (none) or at least 2; use 20 for 5 %"
        )
    if tokenizer == "byte" and eos is not None:
        problems.append(
            f"eos {eos!r} means nothing to the byte tokenizer, which has its own; remove it"
        )
    if problems:
        raise ValueError("\n".join(problems))


def _read(
    files: Sequence[Path],
    document: str,
    text_field: str,
    progress: Callable[[int, int], None],
) -> Iterator[Piece]:
    """The pieces of all files in order; `progress` counts the bytes of all files."""
    sizes = [file.stat().st_size for file in files]
    before = 0

    def report(done: int) -> None:
        progress(before + done, sum(sizes))

    for file, size in zip(files, sizes):
        yield from read_pieces(file, document, text_field, report)
        report(size)
        before += size


def _write(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    writers: Mapping[str, TokenWriter],
    validation_every: int,
) -> int:
    """Write each document to its split; returns the number of documents."""
    count, waiting = 0, ""
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]  # id 0 is a legal end
    for piece in pieces:
        held_out = validation_every and count % validation_every == validation_every - 1
        writer = writers["validation" if held_out else "train"]
        text = waiting + piece.text
        # A JSON tokenizer may merge across the end of a piece: it needs the whole document.
        if not piece.last and not tokenizer.splittable:
            waiting = text
            continue
        writer.add(tokenizer.encode(text) + (end if piece.last else []), piece.last)
        waiting = ""
        count += piece.last
    return count


def _refuse_empty(writers: dict[str, TokenWriter], num_documents: int) -> None:
    """Raise InvalidData for a split without a document."""
    for split, writer in writers.items():
        if writer.num_tokens == 0 and num_documents == 0:
            raise InvalidData(
                "the input must hold text, but every document is empty; check the paths"
            )
        if writer.num_tokens == 0:
            raise InvalidData(
                f"split {split} would be empty with {num_documents} documents; use a smaller "
                "validation_every, or document line or blank_line for more documents"
            )

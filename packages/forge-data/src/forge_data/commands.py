"""The commands of forge-data as functions; needs the extra `cli`. `COMMANDS` can be mounted in another program."""

# Inputs are text: a Path does not show whether "" was given, which is an empty variable and not a folder.
# No `from __future__ import annotations`: tyro reads the annotations as objects.
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from forge_data._shared.paths import user_path
from forge_data._shared.problems import invalid
from forge_data._shared.record_keys import unread_keys
from forge_data.config import SPLITS
from forge_data.errors import invalid_data
from forge_data.packing import PackedStream
from forge_data.packing_config import PACKINGS
from forge_data.packing_plan import plan_rows
from forge_data.prepare import Prepared, Progress
from forge_data.prepare import merge as merge_parts
from forge_data.prepare import prepare as prepare_files
from forge_data.tokenizer import describe_ends, load_tokenizer
from forge_data.tokens.files import TokenFiles
from forge_data.tokens.files import verify as verify_files
from forge_data.tokens.format import read_sidecar, read_statistics, waiting_parts

_SHOWN = 64  # tokens that `inspect` decodes: a few lines of a terminal


def prepare(
    inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH...")],
    output: Path,
    tokenizer: str = "byte",
    eos: str | None = None,
    bos: str | None = None,
    validation_every: int = 0,
    validation_fraction: float = 0.0,
    deduplicate: bool = False,
    document: Literal["file", "line", "blank_line"] = "file",
    text_field: str = "text",
    ignore_keys: tuple[str, ...] = (),
    strict: bool = False,
    overwrite: bool = False,
    workers: int = 1,
    shard: str | None = None,
) -> None:
    """Turn text into token files. Killed, the same command goes on from what is done.

    Args:
        inputs: Files of text, .jsonl (.ndjson, .json), .csv and .parquet, and folders; all but .parquet also as .gz, .zst, .xz, .bz2.
        output: Folder to write; it appears complete or not at all.
        tokenizer: "byte", or the path of a JSON file of the tokenizers library.
        eos: Token that ends a document, or "" for none; left out, that of the tokenizer's files.
        bos: Token that begins a document, or "" for none; left out, as the tokenizer begins a text.
        validation_every: Every N-th document is held out for validation; 0 for none.
        validation_fraction: Share of documents held out by a digest of their text; 0 for none.
        deduplicate: Drop each document whose text an earlier one has.
        document: Unit of a document in .txt and .md files.
        text_field: Key of the text in .jsonl records, column of the text in .csv and .parquet files.
        ignore_keys: Keys of records to leave out although they hold what is not read, such as images.
        strict: Any key of a record that is not read is an error.
        overwrite: Replace token files at the output, once the new ones are complete.
        workers: Processes that tokenize.
        shard: I/N, do part I (from 0) of N in OUTPUT.parts, for `forge-data merge OUTPUT` when all are done.
    """
    options = {**locals(), "shard": None if shard is None else _parse_shard(shard)}
    with _progress() as progress:
        result = prepare_files(**options, progress=progress)
    _print_result(result)


def merge(output: Annotated[Path, tyro.conf.Positional], overwrite: bool = False) -> None:
    """Write token files from the parts of all shards.

    Args:
        output: The `--output` of the shards; it appears complete or not at all.
        overwrite: Replace token files at the output, once the new ones are complete.
    """
    with _progress() as progress:
        result = merge_parts(output, overwrite=overwrite, progress=progress)
    _print_result(result)


def inspect(path: Annotated[Path, tyro.conf.Positional], seq_len: int | None = None) -> None:
    """Show statistics, the sidecar of token files, and the first tokens as text.

    Args:
        path: Folder written by `forge-data prepare`.
        seq_len: Tokens in a row: also how full each packing makes rows, and how many documents it cuts.
    """
    path = user_path(path)
    _require_folder(path)
    if (statistics := read_statistics(path)) is not None:
        _print_statistics(statistics)

    splits = [s for s in SPLITS if (path / s).is_dir()]
    for folder in [path / s for s in splits] or [path]:
        sidecar, source = read_sidecar(folder), TokenFiles(folder, verify="off")
        print(folder)
        for key, value in vars(sidecar).items():
            if key not in ("sha256", "tokenizer"):
                print(f"  {key}: {value:,}" if isinstance(value, int) else f"  {key}: {value}")

        print(f"  tokenizer: {_describe(sidecar.tokenizer)}")
        for name, digest in sidecar.sha256.items():
            print(f"  sha256 {name}: {digest}")

        ids = source.read(0, min(_SHOWN, source.num_tokens)).tolist()
        print(f"  first ids: {' '.join(map(str, ids[:16]))}")
        if source.tokenizer is not None:
            tokenizer = load_tokenizer(source.tokenizer)
            print(f"  first text: {tokenizer.decode(ids)!r}")
            if ends := describe_ends(tokenizer):
                print(f"  documents {ends}")
        for line in [] if seq_len is None else _packings(source, seq_len):
            print(f"  {line}")


def _packings(source: TokenFiles, seq_len: int) -> Iterator[str]:
    """A line for each packing of a source, planned in memory."""
    lengths = np.diff(source.documents, append=source.num_tokens)
    for name in PACKINGS:
        plan = None if name == "concatenate" else plan_rows(lengths, seq_len, name)
        found = PackedStream(source, seq_len, plan=plan).report()
        yield (
            f"{name} at {seq_len}: {found['rows']:,} rows, {found['utilisation']:.2%} tokens, "
            f"{found['cut_documents']:,} documents cut"
        )


def verify(path: Annotated[Path, tyro.conf.Positional]) -> None:
    """Read token files and check every digest and count.

    Args:
        path: Folder written by `forge-data prepare`.
    """
    path = user_path(path)
    _require_folder(path)
    print(f"{path}: {verify_files(path):,} tokens, every digest is right")


COMMANDS: dict[str, Callable[..., None]] = {
    "prepare": prepare,
    "merge": merge,
    "inspect": inspect,
    "verify": verify,
}


def run(arguments: Sequence[str] | None = None) -> None:
    """Parse and run one command; raises its exceptions, and SystemExit from tyro."""
    tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="forge-data",
        description="Text to token files, and a look at them.",
        args=arguments,
        use_underscores=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _describe(spec: dict[str, Any] | None) -> str:
    return "none recorded" if spec is None else ", ".join(f"{k} {v}" for k, v in spec.items())


def _parse_shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        rule = "must be I/N, such as 0/8 for the first of eight"
        raise invalid("shard", "format", text, rule, "correct it")
    return int(index), int(count)


def _require_folder(path: Path) -> None:
    """Raise InvalidData if nothing is at `path`, or a file; reads nothing."""
    rule = "must be a folder written by forge-data prepare"
    if not path.exists():
        fix = f"check it{waiting_parts(path)}"
        rule = f"{rule}, and nothing is there"
        raise invalid_data("path", "not_found", str(path), rule, fix)
    if path.is_file():
        fix = "files of other formats have no digests to compare, and are checked when a run opens them"
        raise invalid_data("path", "not_a_folder", str(path), rule, fix)


def _print_result(result: Prepared) -> None:
    if result.statistics:
        _print_statistics(result.statistics)
    else:
        for name, tokens in result.num_tokens.items():
            print(f"{name}: {tokens:,} tokens in {result.num_documents[name]:,} documents")
    if result.ends:
        print(f"documents {result.ends}")
    print(f"wrote {result.output}")


def _print_statistics(statistics: dict[str, Any]) -> None:
    """Lines of counts, tokens per byte and lengths for each split, and what was dropped."""
    for name, found in statistics["splits"].items():
        print(
            f"{name}: {found['tokens']:,} tokens in {found['documents']:,} documents, "
            f"{found['tokens_per_byte']:.4f} tokens per byte"
        )
        lengths = ", ".join(
            f"{float(q):.0%} {length:,}" for q, length in found["length_quantiles"].items()
        )
        print(f"  tokens of a document: {lengths}")
    if line := unread_keys(statistics.get("not_read", {})):
        print(line.removeprefix("; "))
    if (dropped := statistics.get("duplicates")) is not None:
        print(
            f"duplicates dropped: {dropped['documents']:,} documents, {dropped['tokens']:,} tokens"
        )


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A progress bar on a terminal, else a line every 5 seconds; both on stderr."""
    with _bar() if sys.stderr.isatty() else _lines() as show:
        rate = _Rate()
        yield lambda progress: show(progress, rate(progress))


class _Rate:
    """Tokens per second since the first report of a stage: units done before it took no time now."""

    def __init__(self) -> None:
        self._stage, self._start, self._tokens = "", 0.0, 0

    def __call__(self, progress: Progress) -> float:
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._start, self._tokens = progress.stage, now, progress.tokens
        return (progress.tokens - self._tokens) / max(now - self._start, 1e-3)


_Show = Callable[[Progress, float], None]


@contextmanager
def _bar() -> Iterator[_Show]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(),
    )
    # No thread that refreshes: workers are forked, and would have a copy of what it holds.
    with Bar(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task, shown = bar.add_task("tokenize", counts=""), 0.0

        def show(progress: Progress, rate: float) -> None:
            nonlocal shown
            if progress.done < progress.total and time.monotonic() - shown < 0.1:
                return
            shown = time.monotonic()
            bar.update(
                task,
                description=progress.stage,
                completed=progress.done,
                total=progress.total,
                counts=f"{progress.documents:,} documents, {rate:,.0f} tokens/s",
                refresh=True,
            )

        yield show


@contextmanager
def _lines() -> Iterator[_Show]:
    last, shown = time.monotonic(), ("", -1)

    def show(progress: Progress, rate: float) -> None:
        nonlocal last, shown
        state = (progress.stage, progress.done)
        late = time.monotonic() - last >= 5
        if state == shown or not (late or progress.done == progress.total):
            return
        last, shown = time.monotonic(), state
        word = {"tokenize": "read", "merge": "merged"}[progress.stage]
        print(
            f"{word} {progress.done:,} of {progress.total:,} bytes, "
            f"{progress.documents:,} documents, {rate:,.0f} tokens/s",
            file=sys.stderr,
            flush=True,
        )

    yield show

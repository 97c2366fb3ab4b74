"""The commands of forge-data as functions; needs the extra `cli`. `COMMANDS` can be mounted in another program."""

# No `from __future__ import annotations`: tyro reads the annotations as objects.
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from forge_data.config import SPLITS
from forge_data.prepare import prepare as prepare_files
from forge_data.sources.sidecar import read_sidecar
from forge_data.sources.token_files import TokenFiles
from forge_data.sources.token_files import verify as verify_files
from forge_data.tokenizer import load_tokenizer

_SHOWN = 64  # tokens that `inspect` decodes


def prepare(
    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    output: Path,
    tokenizer: str = "byte",
    eos: str | None = None,
    validation_every: int = 0,
    document: Literal["file", "line", "blank_line"] = "file",
    text_field: str = "text",
    overwrite: bool = False,
) -> None:
    """Turn text into token files.

    Args:
        inputs: Text files (.jsonl for one record a line), and folders of .txt, .md and .jsonl files.
        output: Folder to write; it appears complete or not at all.
        tokenizer: "byte", or the path of a JSON file of the tokenizers library.
        eos: Token that ends a document; left out, the usual names are tried.
        validation_every: Every N-th document is held out for validation; 0 for none.
        document: Unit of a document in .txt and .md files.
        text_field: Key of the text in .jsonl records.
        overwrite: Replace token files at the output, once the new ones are complete.
    """
    with _progress() as progress:
        result = prepare_files(
            inputs,
            output,
            tokenizer=tokenizer,
            eos=eos,
            validation_every=validation_every,
            document=document,
            text_field=text_field,
            overwrite=overwrite,
            progress=progress,
        )
    for split, tokens in result.num_tokens.items():
        print(f"{split}: {tokens:,} tokens in {result.num_documents[split]:,} documents")
    print(f"wrote {result.output}")


def inspect(path: Annotated[Path, tyro.conf.Positional]) -> None:
    """Show the sidecar of token files, and the first tokens as text.

    Args:
        path: Folder written by `forge-data prepare`.
    """
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
            print(f"  first text: {load_tokenizer(source.tokenizer).decode(ids)!r}")


def verify(path: Annotated[Path, tyro.conf.Positional]) -> None:
    """Read token files and check every digest and count.

    Args:
        path: Folder written by `forge-data prepare`.
    """
    print(f"{path}: {verify_files(path):,} tokens, every digest is right")


COMMANDS: dict[str, Callable[..., None]] = {
    "prepare": prepare,
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
    )


def _describe(spec: dict[str, Any] | None) -> str:
    return "none recorded" if spec is None else ", ".join(f"{k} {v}" for k, v in spec.items())


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, else a line every 5 seconds; both on stderr."""
    if sys.stderr.isatty():
        columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("")
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    last, shown = time.monotonic(), -1

    def line(done: int, total: int) -> None:
        nonlocal last, shown
        if done != shown and (time.monotonic() - last >= 5 or done == total):
            last, shown = time.monotonic(), done
            print(f"read {done:,} of {total:,} bytes", file=sys.stderr, flush=True)

    yield line

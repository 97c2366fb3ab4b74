"""The forge-vlm command: `prepare`, `verify`. Its exit codes are in docs/exit-codes.md."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_vlm._shared.bars import progress_bar
from forge_vlm._shared.limits import limit_problem
from forge_vlm._shared.paths import read_regular, user_path
from forge_vlm._shared.problems import invalid
from forge_vlm._shared.record_keys import unread_keys
from forge_vlm._shared.streams import tolerate
from forge_vlm.data.files import InvalidSample

__all__ = ["main", "run"]

OK, LIMIT, DATA_ERROR, ARGUMENT_ERROR, INTERRUPTED = 0, 1, 65, 78, 130
_NOT_PREPARED = (
    "streaming",
    "virtual_shards",
    "shuffle_window",
)  # keys of a source that reads its files itself


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are one message on stderr, without traceback."""
    tolerate()
    try:
        run(arguments)

        sys.stdout.flush()
    except SystemExit as stop:  # argparse: 0 after --help, 2 after bad arguments, already explained
        return OK if not stop.code else ARGUMENT_ERROR
    except ImportError as error:
        return _fail(f"{error.name} is needed; pip install 'forge-vlm[data]'", ARGUMENT_ERROR)
    except InvalidSample as error:
        return _fail(error, DATA_ERROR)
    except ValueError as error:
        return _fail(error, ARGUMENT_ERROR)
    except (OSError, MemoryError) as error:
        return _fail(error, DATA_ERROR)
    except KeyboardInterrupt:
        return _fail("stopped; the same command goes on from what is done", INTERRUPTED)

    return OK


def run(arguments: Sequence[str] | None = None) -> None:
    """Run one command; raises what `main` prints."""
    given = _parser().parse_args(arguments)
    {"prepare": _prepare, "verify": _verify}[given.command](given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("forge-vlm", description="Data of vision-language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser(
        "prepare",
        help="turn conversations with pictures into a folder that opens at once",
        description="Tokenize conversations and check and copy their pictures, once. Killed, the same command goes on from "
        "what is done.",
    )
    prepare.add_argument(
        "path", help="files of a format, or a job's .toml, whose source is prepared"
    )
    prepare.add_argument(
        "--output", required=True, help="folder; it appears complete or not at all"
    )

    prepare.add_argument(
        "--source", help="name of the source in the job (default: the only one of name vlm)"
    )
    prepare.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the source, as in TOML: template=plain, tokens_per_tile=576, resolution.fixed.size=336",
    )

    prepare.add_argument(
        "--pictures",
        default="copy",
        choices=("copy", "name"),
        help="copy all into the folder, or name those in files of their own",
    )
    prepare.add_argument(
        "--overwrite", action="store_true", help="replace prepared samples at the output"
    )
    prepare.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    verify = commands.add_parser("verify", help="read a prepared folder and check every digest")
    verify.add_argument("path", help="folder written by `forge-vlm prepare`")

    return parser


def _prepare(given: argparse.Namespace) -> None:
    from forge_vlm.data.prepare import prepare
    from forge_vlm.data.source import options_of

    path: str = given.path
    options: dict[str, Any] = {}
    if path.endswith(".toml"):
        path, options = _of_job(user_path(path), given.source)
    elif given.source is not None:
        rule, fix = "names a table of a job", "give its .toml, or leave it out"
        raise invalid("--source", "requires", given.source, rule, fix)

    for item in given.option:
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise invalid("--option", "syntax", item, "must be KEY=VALUE", "write template=plain")
        _set(options, key, _value(value))

    with progress_bar("prepare", of_bytes=False, in_logs=_progress) as bar:
        about = prepare(
            path,
            given.output,
            options_of(path, options),
            pictures=given.pictures,
            overwrite=given.overwrite,
            workers=given.workers,
            progress=bar,
        )
    _show(about)


def _of_job(file: Path, name: str | None) -> tuple[str, dict[str, Any]]:
    """Path and options of a source of a job."""
    try:
        job = tomllib.loads(read_regular(file, 1 << 20).decode())
    except (OSError, ValueError) as error:
        rule = f"must be the TOML of a job ({error})"
        raise invalid("", "not_toml", ..., rule, "correct it", where=file) from None

    tables = job.get("data", {}).get("sources", {})
    own = {
        n: t
        for n, t in tables.items()
        if isinstance(t, dict) and t.get("name") in ("vlm", "forge_vlm.data:open_source")
    }
    if name is None and len(own) == 1:
        name = next(iter(own))

    if name not in own:
        rule = f"must be one of the sources of name 'vlm', {', '.join(own) or 'none'}"
        raise invalid("--source", "unknown", name, rule, "name one", where=file)
    options = {k: v for k, v in own[name].get("options", {}).items() if k not in _NOT_PREPARED}
    return str(own[name].get("path", "")), options


def _set(options: dict[str, Any], key: str, value: Any) -> None:
    """Set a key with dots in nested tables."""
    *tables, last = key.split(".")
    for table in tables:
        inner = options.setdefault(table, {})
        if not isinstance(inner, dict):
            rule = f"goes into {table}, which is {inner!r:.40}"
            raise invalid("--option", "excludes", key, rule, "give one of both")
        options = inner
    options[last] = value


def _value(text: str) -> Any:
    """A value of TOML; other text is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _progress(done: int, total: int) -> None:
    print(f"forge-vlm: {done} of {total} units", file=sys.stderr)


def _show(about: dict[str, Any]) -> None:
    counts = about["counts"]
    print(
        f"{about['samples']:,} samples of {about['records']:,} records, {about['tokens']:,} tokens"
    )
    print(f"{counts.get('pictures', 0):,} pictures, {about['bytes']['media.bin']:,} bytes")
    causes = ", ".join(f"{counts.get(c, 0):,} {c}" for c in ("missing", "damaged"))
    print(f"pictures that cannot be decoded: {causes}; {counts.get('masked', 0):,} masked")
    if line := unread_keys(about.get("unread", {})):
        print(line.removeprefix("; "))
    print(
        f"samples left out: {counts.get('left_out', 0):,}; with nothing to learn: {about['unlearnt']:,}"  # language: key of the manifest
    )


def _verify(given: argparse.Namespace) -> None:
    from forge_vlm.data.prepared import verify

    _show(verify(given.path))


def _fail(message: object, code: int) -> int:
    limit = limit_problem(message) if isinstance(message, BaseException) else None
    print(f"forge-vlm: {limit or message}", file=sys.stderr)
    return LIMIT if limit else code

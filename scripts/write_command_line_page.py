"""Write docs/command-line.md from the help of every command: hatch run dev:python scripts/write_command_line_page.py"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs/command-line.md"
HEAD = """# Command line

Generated from the help of each command by `scripts/write_command_line_page.py`. At the end of this page you know every verb and its
flags. `forge-train VERB --help` prints the same. A verb with `CONFIG.toml` also takes each [key](configuration.md) of the file as a
flag, `--train.steps 100`. Codes are in [exit codes](exit-codes.md).
"""
#: Verbs that forward to others, and have no help of their own.
_FORWARD = ("study", "ckpt", "data")


def commands_as_markdown() -> str:
    """A section for each command, one for each verb below it, with a table of its flags."""
    lines = [HEAD]
    for name, call, verbs in _commands():
        lines += [f"## {name}", ""]
        for verb in verbs:
            lines += _section(f"{name} {verb}", _help(call, [verb, "--help"]))
    return "\n".join(lines).rstrip() + "\n"


def _commands() -> Iterator[tuple[str, Callable[[list[str]], Any], list[str]]]:
    import forge_ckpt.cli
    import forge_data.cli
    import forge_vlm.data.command
    from forge_train import cli

    yield "forge-train", cli.run_verb, [v for v in (*cli.VERBS, *cli.OF_LAB) if v not in _FORWARD]
    for name, main in (
        ("forge-data", forge_data.cli.main),
        ("forge-ckpt", forge_ckpt.cli.main),
        ("forge-vlm", forge_vlm.data.command.main),
    ):
        found = re.search(r"\{([a-z_,]+)\}", _help(main, ["--help"]))
        assert found, name
        yield name, main, found[1].split(",")


def _help(call: Callable[[list[str]], Any], args: list[str]) -> str:
    """What a command prints, in lines so wide that none is broken."""
    shown, before = io.StringIO(), dict(os.environ)
    os.environ |= {"COLUMNS": "1000", "NO_COLOR": "1"}
    try:
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            call(args)
    finally:
        os.environ.clear()
        os.environ |= before
    return shown.getvalue().partition("\nkeys of CONFIG.toml")[0]


def _section(title: str, text: str) -> list[str]:
    """Usage, description and flags of a help text."""
    usage, _, rest = text.partition("\n\n")
    about, *tables = re.split(r"(?m)^ ?(?=[\w ]*(?:options|arguments):?\s*$)", rest)
    lines = [f"### {title}", "", "```text", " ".join(usage.split()), "```", "", _paragraphs(about)]
    rows = [row for table in tables for row in _rows(table)]
    if rows:
        lines += ["", "| argument or flag | meaning |", "|---|---|"]
        lines += [f"| `{flag}` | {meaning} |" for flag, meaning in rows]
    return [*lines, ""]


def _paragraphs(text: str) -> str:
    parts = [" ".join(part.split()) for part in text.split("\n\n")]
    return "\n\n".join(_escaped(part) for part in parts if part)


def _escaped(text: str) -> str:
    """Plain text as Markdown: what is not in a span of code has no markup."""
    plain = {"<": "&lt;", "*": "\\*", "[": "\\["}
    spans = re.split(r"(`[^`]*`)", text)
    return "".join(
        span if span.startswith("`") else re.sub(r"[<*\[]", lambda m: plain[m[0]], span)
        for span in spans
    )


def _rows(table: str) -> Iterator[tuple[str, str]]:
    """(flag, meaning) of each entry: it begins two columns in, and what follows deeper belongs to it."""
    entries: list[list[str]] = []
    for line in table.splitlines()[1:]:
        if re.match(r"  (?!--------)[-\[{\w]", line):
            entries.append(re.split(r"\s{2,}", line.strip(), maxsplit=1))
        elif entries and line.startswith("    ") and line.strip():
            entries[-1].append(line.strip())
    for flag, *meaning in entries:
        if flag != "-h, --help" and not (flag.endswith(".") and not meaning):
            text = re.sub(r" \(default: (None|False|)\)", "", " ".join(meaning))
            yield _cell(flag.replace("{None}|", "")), _cell(_escaped(text))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(commands_as_markdown(), encoding="utf-8")
    print(PAGE)

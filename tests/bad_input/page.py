"""What comes of each bad input: exit code, and key and code of its problems.

    python -m tests.bad_input.page            # write docs/bad-input.md and docs/data/bad-input.json
    python -m tests.bad_input.page --check    # exit code 1 if an input has another exit code, key or code than recorded

Messages are in the page alone, and compared with nothing. An input that is accepted, or rejected without a problem, is
never recorded. Seen to fail: another code in the file, an input without a row, a row without an input.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from forge_testing.warm import Called, WarmProcess

from .corpus import CASES, Call, Case

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, RECORD = DOCS / "bad-input.md", DOCS / "data" / "bad-input.json"
EXIT_CODES = (65, 66, 78)
_HEAD = """# Bad input

Mistakes and damage that are tried on every change, each with its exit code, the key and the code of its first problem,
and the message. `...` stands for a folder of the test. Each input runs in a process with 2 GB of memory to spare and
20 s of processor time, and writes nothing but its message. `python -m tests.bad_input.page` writes this page; exit
codes, keys and codes are tested, messages are not.

"""
_SHOWN = 240


class Answer(NamedTuple):
    """What came of an input: the process, and the problems of its error as keys and codes."""

    called: Called
    problems: list[list[str]]

    @property
    def row(self) -> dict[str, Any]:
        """The entry of docs/data/bad-input.json."""
        return {"exit_code": self.called.code, "problems": self.problems}


def warm_process() -> WarmProcess:
    """One that has imported all that a run needs."""
    return WarmProcess(
        "forge_train.cli", "forge_train.loop.trainer", "forge_lab.text",
        "forge_train.report.summary", "forge_train.plan", "forge_data.prepare", "tests.bad_input.corpus:warm_up",
    )  # fmt: skip


def prepare(warm: WarmProcess, case: Case | Call, folder: Path) -> None:
    """Make the input of a case, in a child of its own."""
    if isinstance(case, Case):
        made = warm.call("tests.bad_input.corpus:prepare", case.name, str(folder), folder=folder)
        assert made.code == 0, made.err


def answer(warm: WarmProcess, case: Case | Call, folder: Path) -> Answer:
    """Give a prepared input to Forge."""
    if isinstance(case, Call):
        called = warm.call("tests.bad_input.corpus:call", case.name, str(folder), folder=folder)
    else:
        args = json.loads((folder / ".args").read_text())
        called = warm.call("tests.bad_input.corpus:command", args, str(folder), folder=folder)
    left = folder / ".problems"
    return Answer(called, json.loads(left.read_text()) if left.exists() else [])


def message(called: Called) -> str:
    """stderr in one line, without the frames of the parser of flags, nor progress of the cache."""
    text = "\n".join(x for x in called.err.splitlines() if not x.startswith("cache: tokenizing"))
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text).strip()


def page_row(case: Case | Call, given: Answer, folder: Path) -> str:
    """The line of a case in the page."""
    text = message(given.called).replace(str(folder), "...").replace("forge-train: ", "", 1)
    text = re.sub(r"[^ -~]", "?", text.split(" forge-train: ")[0]).replace("|", "\\|")
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + " ..."
    key, code = given.problems[0]
    exit_code = "error" if isinstance(case, Call) else given.called.code
    return f"| {case.name} | {exit_code} | {key} | {code} | {text.replace('<', '&lt;')} |"


def answers() -> Iterator[tuple[str, Case | Call, Answer, Path]]:
    """The kind, the case, what came of it, and its folder, of every input."""
    warm = warm_process()
    with tempfile.TemporaryDirectory() as parent:
        for kind, cases in CASES.items():
            for case in cases:
                with tempfile.TemporaryDirectory(dir=parent) as name:
                    prepare(warm, case, Path(name))
                    yield kind, case, answer(warm, case, Path(name)), Path(name)
    warm.close()


def wrong(name: str, given: Answer, recorded: dict[str, Any]) -> str:
    """How an answer differs from its record; "" if it does not."""
    of_a_rule = [code for _, code in given.problems[:1] if code != "error"]
    if given.called.code not in EXIT_CODES or not of_a_rule:
        return f"{name}: exit code {given.called.code} with problems {given.problems}"
    if name not in recorded:
        return f"{name}: {RECORD.name} lacks it"
    return (
        "" if given.row == recorded[name] else f"{name}: {given.row}, recorded is {recorded[name]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, and compare")
    args = parser.parse_args()
    recorded = json.loads(RECORD.read_text()) if args.check else {}
    rows: dict[str, Any] = {}
    lines, last, problems = [_HEAD], "", []
    for kind, case, given, folder in answers():
        rows[case.name] = given.row
        if problem := wrong(case.name, given, recorded if args.check else rows):
            problems.append(problem)
            continue
        if kind != last:
            table = "| input | exit code | key | code | message |\n|---|---|---|---|---|\n"
            lines.append(("\n" if last else "") + f"## {kind}\n\n{table}")
            last = kind
        lines.append(page_row(case, given, folder) + "\n")
    problems += [f"{name}: is recorded, and no input" for name in recorded if name not in rows]
    print("\n".join(problems) or f"{len(rows)} inputs", file=sys.stderr if problems else sys.stdout)
    if not problems and not args.check:
        PAGE.write_text("".join(lines), encoding="utf-8")
        text = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        RECORD.write_text("{\n" + text + "\n}\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

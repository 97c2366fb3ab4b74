"""docs/bad-input.md, from what the corpus is told: python -m tests.bad_input.page writes it."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from forge_testing.warm import Called, WarmProcess

from .corpus import CASES, Call, Case

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bad-input.md"
_HEAD = """# Bad input

The kinds of mistakes and damage that are tried on every change, each with the exit code it gets and the
first sentence of what is said: value, rule, fix. `...` stands for a folder of the test. Each case runs in a
process with 2 GB of memory to spare and 20 s of processor time, and writes nothing but its message.
The page is written by `python -m tests.bad_input.page`; a test compares each row with what is said now.

"""
_SHOWN = 240


def warm_process() -> WarmProcess:
    """One that has imported all that a run needs."""
    return WarmProcess(
        "forge_train.cli", "forge_train.trainer.trainer", "forge_train.report.text",
        "forge_train.report.summary", "forge_train.plan", "forge_data.prepare", "tests.bad_input.corpus:warm_up",
    )  # fmt: skip


def prepare(warm: WarmProcess, case: Case | Call, folder: Path) -> None:
    """Make the input of a case, in a child of its own."""
    if isinstance(case, Case):
        made = warm.call("tests.bad_input.corpus:prepare", case.name, str(folder), folder=folder)
        assert made.code == 0, made.err


def tell(warm: WarmProcess, case: Case | Call, folder: Path) -> Called:
    """What is said of it."""
    if isinstance(case, Call):
        return warm.call("tests.bad_input.corpus:call", case.name, str(folder), folder=folder)
    args = json.loads((folder / ".args").read_text())
    return warm.call("forge_train.cli:main", args, folder=folder)


def message(told: Called) -> str:
    """stderr in one line, without the frames that tyro draws, nor what the cache tells before."""
    said = "\n".join(x for x in told.err.splitlines() if not x.startswith("forge-data: tokenizing"))
    return re.sub(r"[\s│╭╮╰╯─]+", " ", said).strip()


def row(case: Case | Call, told: Called, folder: Path) -> str:
    """The line of a case in the page."""
    said = message(told).replace(str(folder), "...").replace("forge-train: ", "", 1)
    said = re.sub(r"[^ -~]", "?", said.split(" forge-train: ")[0]).replace("|", "\\|")
    said = said if len(said) <= _SHOWN else said[:_SHOWN] + " ..."
    code = "error" if isinstance(case, Call) else told.code
    return f"| {case.name} | {code} | {said.replace('<', '&lt;')} |"


def main() -> None:
    warm, lines = warm_process(), [_HEAD]
    parent = tempfile.TemporaryDirectory()
    for kind, cases in CASES.items():
        lines.append(f"## {kind}\n\n| input | exit code | what is said |\n|---|---|---|\n")
        for case in cases:
            with tempfile.TemporaryDirectory(dir=parent.name) as name:
                folder = Path(name)
                prepare(warm, case, folder)
                lines.append(row(case, tell(warm, case, folder), folder) + "\n")
        lines.append("\n")
    warm.close()
    parent.cleanup()
    PAGE.write_text("".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

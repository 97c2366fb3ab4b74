"""The grid of docs/exit-codes.md: which code each fault ends a run with, at each place.

    python -m tests.exit_codes.page            # write the grid into docs/exit-codes.md

The cells are those that tests/exit_codes/test_grid.py asserts.
"""

from __future__ import annotations

from pathlib import Path

from forge_testing.warm import WarmProcess

from .grid import FAULTS, KILLED, PLACES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exit-codes.md"
_BEGIN = "<!-- grid: python -m tests.exit_codes.page -->\n"
_END = "<!-- end of the grid -->\n"  # prose: a mark of the page


def warm_process() -> WarmProcess:
    """One that has imported all that a life needs."""
    return WarmProcess(
        "forge_train.cli", "forge_train.loop.trainer", "forge_train.report.summary",
        "forge_data.prepare", "forge_resilience.supervise", "torch._dynamo", "torch.distributed.checkpoint",
        "torch.distributed.tensor", "torch.distributed.fsdp", "numpy.random", "tests.exit_codes.grid:warm_up",
    )  # fmt: skip


def table() -> str:
    """The grid as a table; a cell without a code has a footnote."""
    notes: list[str] = []
    lines = [f"| fault | {' | '.join(PLACES)} |", f"|---|{'---:|' * len(PLACES)}"]
    for fault in FAULTS:
        cells = []
        for code in fault.codes:
            if isinstance(code, str) and code not in notes:
                notes.append(code)
            shown = f"({notes.index(code) + 1})" if isinstance(code, str) else str(128 - code if code == KILLED else code)  # fmt: skip
            cells.append(shown)
        lines.append(f"| {fault.name} | {' | '.join(cells)} |")
    told = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", *told]) + "\n"


def main() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(_BEGIN)
    PAGE.write_text(f"{before}{_BEGIN}\n{table()}\n{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    main()

"""Write docs/configuration.md from the dataclasses: hatch run python scripts/write_configuration_page.py"""

from __future__ import annotations

from pathlib import Path

from forge_train.report.describe import key_rows

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEAD = """# Configuration

Every key of a job, generated from the dataclasses that check it. Each can be set in a TOML file or as
a flag, `--train.steps 100`; `<name>` is a name of your choice. `none` unsets an optional value. The
range of a number is the rule of its check. With
`model.name = "package.module:function"` the other keys of `[model]` are `vocab_size` and the table
`args`, the keyword arguments of that function.

"""


def page() -> str:
    """The text of docs/configuration.md."""
    lines = ["| key | type | range | default | meaning |", "|---|---|---|---|---|"]
    for row in key_rows():
        default = f"`{row.default}`" if row.default else ""
        cells = [f"`{row.key}`", row.type, row.range, default, row.meaning]
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)

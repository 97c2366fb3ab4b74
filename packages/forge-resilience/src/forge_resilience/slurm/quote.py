"""Text as bash and sbatch read it."""

from __future__ import annotations

import re

__all__ = ["directive", "expanded"]


def expanded(text: str) -> str:
    """`text` as one word of bash in which only a leading `~/`, `$NAME` and `${NAME}` are expanded."""
    text = "$HOME" + text[1:] if text.startswith("~/") else text
    text = re.sub(r'([\\"`])', r"\\\1", text)
    return '"' + re.sub(r"\$(?!\w|\{\w+\})|\$(?=\d)", r"\\$", text) + '"'


def directive(option: str, value: str | None = None) -> str:
    """A line `#SBATCH --option=value`; sbatch reads quotes and backslashes as a shell does, and no variables."""
    if value is None:
        return f"#SBATCH {option}"
    plain = re.fullmatch(r"[\w./:@,+%=\-]+", value, re.ASCII)
    return f"#SBATCH {option}=" + (
        value if plain else '"' + re.sub(r'([\\"])', r"\\\1", value) + '"'
    )

"""Numbers that may only fall, in scripts/records.toml: compare with them, and lower them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).with_name("records.toml")
_HEAD = """\
# Numbers that may only fall; `--record` of the script that a section names lowers them. To raise one, write a list: the
# record before, then the new number with its reason, as in `forge_core = [7419, [7450, "why it has to grow"]]`.
"""


def load(path: Path | None = None) -> dict[str, dict[str, Any]]:
    """The sections of the file, each with a number, or a list that ends in one with its reason, by name."""
    file = path or RECORDS
    return tomllib.loads(file.read_text()) if file.exists() else {}


def limit(entry: Any) -> float:
    """The number of an entry that holds today."""
    if not isinstance(entry, list):
        return float(entry)
    return float(entry[-1][0] if isinstance(entry[-1], list) else entry[-1])


def problems(section: str, found: Mapping[str, float], path: Path | None = None) -> list[str]:
    """Lines for names without a record, names that grew, records of nothing, and raises without a reason."""
    entries = load(path).get(section, {})
    lines = [f"{section}: {name} ({found[name]:g}) has no record; run with --record" for name in found if name not in entries]  # fmt: skip
    lines += [f"{section}: {name} is recorded and not counted; run with --record" for name in entries if name not in found]  # fmt: skip
    for name, entry in entries.items():
        if isinstance(entry, list) and not all(_has_reason(raised) for raised in entry[1:]):
            lines.append(f"{section}: the record of {name} is raised without a reason; write it")
        if name in found and found[name] > limit(entry):
            lines.append(
                f"{section}: {name} is {found[name]:g}, the record is {limit(entry):g}; lower it, or raise the record, in "
                f"[{section}] of scripts/records.toml: {json.dumps(name)} = [{limit(entry):g}, [{found[name]:g}, "
                '"why it has to grow"]]'
            )
    return lines


def _has_reason(raised: Any) -> bool:
    return isinstance(raised, list) and len(raised) == 2 and len(str(raised[1]).split()) >= 3


def record(section: str, found: Mapping[str, float], path: Path | None = None) -> None:
    """Write lower numbers, new names, and leave out names that are not counted any more. Raises nothing."""
    file, sections = path or RECORDS, load(path)
    old = sections.get(section, {})
    sections[section] = {
        name: old[name] if name in old and limit(old[name]) <= number else number
        for name, number in sorted(found.items())
    }
    parts = [_HEAD]
    for title in sorted(sections):
        rows = [f"{json.dumps(name)} = {json.dumps(entry)}" for name, entry in sections[title].items()]  # fmt: skip
        parts.append("\n".join([f"[{title}]", *rows]) + "\n")
    file.write_text("\n".join(parts))

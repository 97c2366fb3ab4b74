"""The page of the versions of torch that the suite has run with, from the rows that the runs write."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "docs/data/torch-versions.json"
PAGE = ROOT / "docs/torch-versions.md"
#: They use the private names of torch that change most: FSDP2, pipelines, DTensor, grouped products.
NEEDED = {"packages/forge-moe", "packages/forge-parallel", "tests/equivalence"}
Row = Mapping[str, Any]

_HEAD = """# torch versions

Forge is installed with `torch{bound}`. It uses private names of torch, so the bounds are the oldest and the newest
version with which the quick tests of forge-moe, forge-parallel and the equivalence of layouts have passed, and all
else that ran: {seen}.

This page is written by `hatch run torch-2.11`, `hatch run torch-newest` and `hatch run torch-own` (the version of
`constraints.txt`, which continuous integration has), from `torch-versions.json`. Each run tests what is committed
then; a row keeps its commit until the next run. Builds for CUDA ran without a GPU or driver.
The quick lane is `hatch run quick`; the slow one is the rest of `hatch run nightly everything`.

"""
_FOLDERS = """
## By folder

Passed tests of the quick lane + those of the slow lane; an empty cell was not run.

"""


def identity(row: Row) -> tuple[Version, str, str, str]:
    """Version, build, folder and lane: a later run replaces the row."""
    return Version(row["torch"]), row["build"], row["folder"], row["lane"]


def seen(rows: Iterable[Row]) -> list[Version]:
    """Versions with which all that ran passed, the quick tests of `NEEDED` among it."""
    rows = list(rows)
    return [
        Version(version)
        for version, _ in _versions(rows)
        if not any(row["failed"] for row in rows if row["torch"] == version)
        and {r["folder"] for r in rows if (r["torch"], r["lane"]) == (version, "quick")} >= NEEDED
    ]


def bound() -> SpecifierSet:
    """The versions of torch that forge-core can be installed with."""
    project = tomllib.loads((ROOT / "packages/forge-core/pyproject.toml").read_text())["project"]
    return next(r.specifier for r in map(Requirement, project["dependencies"]) if r.name == "torch")


def supported() -> list[str]:
    """The versions that have a hatch environment, oldest first."""
    environments = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]
    versions: list[str] = environments["torch"]["matrix"][0]["version"]
    return versions


def page(rows: Sequence[Row]) -> str:
    """Markdown of all rows."""
    limits = ",".join(sorted(map(str, bound()), reverse=True))
    text = _HEAD.format(bound=limits, seen=", ".join(map(str, seen(rows))))
    text += "| torch | build | Python | quick | slow | commits |\n|---|---|---|---|---|---|\n"
    for version, build in _versions(rows):
        mine = [row for row in rows if (row["torch"], row["build"]) == (version, build)]
        lanes = [_counts([r for r in mine if r["lane"] == lane]) for lane in ("quick", "slow")]
        cells = [version, build, _distinct(mine, "python"), *lanes, _distinct(mine, "commit")]
        text += f"| {' | '.join(cells)} |\n"
    for version in supported():
        if version not in {row["torch"] for row in rows}:
            text += f"| {version} | not run | | | | |\n"
    return text + _FOLDERS + _square(rows) + _failures(rows) + _skips(rows) + _warnings(rows)


def _versions(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """(version, build), oldest first."""
    return sorted({(r["torch"], r["build"]) for r in rows}, key=lambda v: (Version(v[0]), v[1]))


def _counts(rows: Sequence[Row]) -> str:
    if not rows:
        return "not run"
    passed, failed, skipped = (
        sum(row[name] for row in rows) for name in ("passed", "failed", "skipped")
    )
    red = f", **{failed} failed**" if failed else ""
    return f"{passed:,} passed{red}, {skipped} skipped in {len(rows)} folders"


def _square(rows: Sequence[Row]) -> str:
    versions = _versions(rows)
    lines = ["| folder | " + " | ".join(version for version, _ in versions) + " |"]
    lines.append("|---" * (len(versions) + 1) + "|")
    for folder in sorted({row["folder"] for row in rows}):
        cells = [
            _cell([r for r in rows if (r["torch"], r["build"], r["folder"]) == (*v, folder)])
            for v in versions
        ]
        lines.append(f"| {folder} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(rows: Sequence[Row]) -> str:
    failed = sum(row["failed"] for row in rows)
    passed = " + ".join(str(row["passed"]) for row in rows)  # sorted: quick before slow
    return passed + (f", **{failed} failed**" if failed else "")


def _failures(rows: Sequence[Row]) -> str:
    text = ""
    for title, key in (
        ("Failed", "failures"),
        ("Failed among others, passed when run again one after another", "passed_alone"),
    ):
        found = [f"- {row['torch']}: `{name}`" for row in rows for name in row[key]]
        text += f"\n## {title}\n\n" + "\n".join(found or ["None."]) + "\n"
    return text


def _skips(rows: Sequence[Row]) -> str:
    totals: dict[tuple[str, str], int] = {}
    for row in rows:
        for reason, count in row["skips"].items():
            key = (row["torch"], reason)
            totals[key] = totals.get(key, 0) + count
    lines = [f"- {version}: {count}, {reason}" for (version, reason), count in totals.items()]
    return "\n## Skipped\n\n" + "\n".join(lines or ["None."]) + "\n"


def _warnings(rows: Sequence[Row]) -> str:
    """Each warning once, with the versions that give it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for warning in row["warnings"]:
            versions = found.setdefault(warning, [])
            if row["torch"] not in versions:
                versions.append(row["torch"])
    lines = [f"- {', '.join(versions)}: {warning}" for warning, versions in sorted(found.items())]
    return (
        "\n## Warnings of things that torch will remove\n\nIn the processes of the tests themselves.\n\n"
        + "\n".join(lines or ["None."])
        + "\n"
    )


def _distinct(rows: Iterable[Row], key: str) -> str:
    return ", ".join(dict.fromkeys(row[key] for row in rows))

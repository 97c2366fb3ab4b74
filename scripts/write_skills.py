"""Write the lists of flags in skills/*/SKILL.md from the help of forge-train: hatch run python scripts/write_skills.py [--check]

The part between `<!-- help: VERBS -->` and `<!-- end of help -->` is replaced. `--check` writes nothing and ends with 1 if a
list is stale. Seen to fail: a flag that was renamed in one skill.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

from forge_parallel.prove.__main__ import main as prove
from forge_train import cli

SKILLS = sorted((Path(__file__).resolve().parent.parent / "skills").glob("*/SKILL.md"))
_PART = re.compile(r"(<!-- help:([^\n]*)-->\n).*?(<!-- end of help -->)", re.S)


def help_of(verb: str) -> list[str]:
    """Usage, first sentence and flags of a verb of forge-train, or of `prove`."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        prove(["--help"]) if verb == "prove" else cli.run_verb([verb, "--help"])
    usage, _, rest = shown.getvalue().partition("\n\n")
    usage = " ".join(usage.split())
    about = rest.strip().partition("\n")[0]
    flags = re.findall(r"^(?:\S |  )(--[\w-]+)", rest, flags=re.M)
    return [
        f"- `{usage.removeprefix('usage: ')}`: {about}",
        f"  Flags: {', '.join(flags) or 'none'}.",
    ]


def written(text: str) -> str:
    """A skill with its lists as they are now."""

    def part(found: re.Match[str]) -> str:
        lines = [line for verb in found[2].split() for line in help_of(verb)]
        return found[1] + "".join(f"{line}\n" for line in lines) + found[3]

    return _PART.sub(part, text)


def main() -> int:
    stale = [
        file
        for file in SKILLS
        if written(file.read_text(encoding="utf-8")) != file.read_text(encoding="utf-8")
    ]
    for file in stale:
        if "--check" in sys.argv[1:]:
            print(
                f"{file}: the flags are those of another version; run python scripts/write_skills.py"
            )
        else:
            file.write_text(written(file.read_text(encoding="utf-8")), encoding="utf-8")
            print(file)
    return int(bool(stale) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())

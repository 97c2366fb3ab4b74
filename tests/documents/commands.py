"""The names in a command of a page: its program, its script of hatch, its files and its options exist.

As a program it stands for `hatch` and `pip` where blocks run: `python commands.py --as-hatch VENV run mutations --lane test`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Command lines of packages, and the modules that define their options.
_PROGRAMS = {
    "forge-ckpt": "forge_ckpt.verbs",
    "forge-data": "forge_data.commands",
    "forge-vlm": "forge_vlm.data.command",
}
_STARTS = ("forge-train", *_PROGRAMS, "hatch", "python", "torchrun")


def commands_of(code: str) -> Iterator[list[str]]:
    """The words of each command in shell code that starts a program of this repository."""
    for line in re.sub(r" *\\\n(?:> )?", " ", code).splitlines():
        with contextlib.suppress(ValueError):  # a quote that ends on another line
            shell = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=";&|<>")
            shell.whitespace_split = True
            words: list[str] = []
            for word in [*shell, ";"]:
                if set(word) <= set(";&|<>"):
                    first = next((i for i, w in enumerate(words) if w in _STARTS), len(words))
                    if words[first:]:
                        yield words[first:]
                    words = []
                else:
                    words.append(word)


def missing_names(words: list[str]) -> list[str]:
    """What a command names and the repository does not have."""
    program, *rest = words
    if program == "hatch":
        return _missing_of_hatch(rest)
    if program == "torchrun":
        start = next((i for i, w in enumerate(rest) if w == "-m" or w.endswith(".py")), len(rest))
        program, rest = "python", rest[start:]
    if program in _PROGRAMS:
        program, rest = "python", ["-m", _PROGRAMS[program], *rest]
    if rest[:2] == ["-m", "forge_train"]:
        program, rest = "forge-train", rest[2:]

    if program == "forge-train":
        return _missing_of_train(rest)
    if rest[:1] == ["-m"]:
        file = _file_of(rest[1])
        if file is None:
            return (
                [rest[1]]
                if rest[1].startswith(("forge_", "tests.", "examples.", "benchmarks."))
                else []
            )
        return _missing_options(rest[2:], _text_of(file))
    file = ROOT / rest[0] if rest and rest[0].endswith(".py") else None
    if file is None or "/" not in rest[0]:  # a page writes files of its own at the top
        return []
    return _missing_options(rest[1:], _text_of(file)) if file.is_file() else [rest[0]]


def _missing_options(words: Iterable[str], text: str) -> list[str]:
    """Options, up to `--`, that the source of a command line does not define."""
    found = []
    for word in words:
        if word == "--":
            break
        option = re.match(r"--(?:no[-_])?([\w.-]+)", word)
        name = option and re.sub("[-_]", "[-_]", option[1])
        if name and not re.search(rf'--{name}(?![\w-])|[ (]{name}: |name="{name}"', text):
            found.append(word)
    return found


def _file_of(module: str) -> Path | None:
    """The file or the folder of a module of this repository."""
    for folder in (ROOT, *ROOT.glob("packages/*/src"), *ROOT.glob("apps/*/src")):
        path = folder / module.replace(".", "/")
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
        if path.is_dir():
            return path
    return None


def _text_of(path: Path) -> str:
    """The source of a file, or of all files of a folder."""
    return "".join(p.read_text() for p in ([path] if path.is_file() else path.rglob("*.py")))


# ---- forge-train


def _missing_of_train(words: list[str]) -> list[str]:
    from forge_train.cli import OF_LAB, VERBS

    verb, *rest = words or [""]
    if verb in ("ckpt", "data"):
        return missing_names([f"forge-{verb}", *rest])
    if not re.fullmatch("[a-z]+", verb):  # VERB, an option, or a sentence on the program
        return []
    if verb not in (*VERBS, *OF_LAB):
        return [f"forge-train {verb}"]
    flags = [word for word in rest if "." not in word.partition("=")[0]]  # the others are keys
    return _missing_options(flags, _help_of(verb) + " --help")


@functools.cache
def _help_of(verb: str) -> str:
    from forge_train import cli

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        cli.run_verb([verb, "--help"])
    return shown.getvalue()


# ---- hatch and pip


def _missing_of_hatch(words: list[str]) -> list[str]:
    verb, *rest = [word for word in words if word != "-v"] or [""]
    if verb == "test":
        return [
            w for w in rest[: _end(rest)] if "/" in w and not (ROOT / w.partition("::")[0]).exists()
        ]
    if verb != "run" or not rest:
        return [] if verb in ("", "build", "run") else [verb]
    command, arguments = _script_of_hatch(rest[0]), rest[1:]
    if command is None:
        program = rest[0].rpartition(":")[2]
        known = program in _STARTS or (Path(sys.executable).parent / program).exists()
        return missing_names([program, *arguments]) if known else [program]
    module = re.match(r"python (?:-m )?([\w./-]+)", command)
    file = module and (ROOT / module[1] if "/" in module[1] else _file_of(module[1]))
    return _missing_options(arguments, _text_of(file)) if file else []


def _end(words: list[str]) -> int:
    return words.index("--") if "--" in words else len(words)


def _script_of_hatch(name: str) -> str | None:
    """The command of a script, by way of the scripts that only run another one; None if `name` is a program."""
    environment, _, script = name.rpartition(":")
    found = _environments()[environment or "default"].get("scripts", {}).get(script)
    if isinstance(found, str) and (other := re.match(r"hatch run (\S+:\S+)", found)):
        return _script_of_hatch(other[1])
    return found if found is None or isinstance(found, str) else " ".join(found)


@functools.cache
def _environments() -> dict[str, Any]:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]
    return {"torch.2.11.0": found["torch"], "torch.2.15.0": found["torch"], **found}


def as_hatch(home: Path, words: list[str]) -> int:
    """`hatch` as printed: a program runs, a script or a lane must exist with its options."""
    if words[0] != "run" or _script_of_hatch(words[1]) is not None:
        return _print(_missing_of_hatch(words))
    environ = {**os.environ, "PATH": f"{home}/bin:{os.environ['PATH']}"}
    return subprocess.run([words[1].rpartition(":")[2], *words[2:]], env=environ).returncode


def as_pip(words: list[str]) -> int:
    """`pip install` as printed: a folder must be a package with that extra, a name must be one that constraints.txt pins."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    known = {line.split("==")[0].lower() for line in lines} | {"hatch"}
    verb, *targets = words
    missing = [] if verb == "install" else [verb]
    for target in targets:
        if target.startswith("-") or (ROOT / target).is_file():  # -c FILE
            continue
        name, _, extras = target.rstrip("]").partition("[")
        if name.startswith("."):
            file = ROOT / name / "pyproject.toml"
            project = tomllib.loads(file.read_text())["project"] if file.is_file() else None
            of_project = project.get("optional-dependencies", {}) if project else {}
            if project is None or not set(filter(None, extras.split(","))) <= of_project.keys():
                missing.append(target)
        elif re.split("[<>=~!]", name)[0].lower() not in known:
            missing.append(target)
    return _print(missing)


def _print(names: list[str]) -> int:
    for name in names:
        print(name, "is missing", file=sys.stderr)
    return len(names)


if __name__ == "__main__":
    if sys.argv[1] == "--as-hatch":
        sys.exit(as_hatch(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(as_pip(sys.argv[3:]))

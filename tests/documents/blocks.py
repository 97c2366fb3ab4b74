"""Run the blocks of a page as printed, as a reader would who copies them from top to bottom.

    python -m tests.documents.blocks              # all pages: seconds, and the blocks that are not run
    python -m tests.documents.blocks README.md    # one

Blocks in `bash` run one after another in a copy of the checkout without `tests/`, in which `runs/debug` holds the result of
`hatch run train`; variables and the folder last from block to block. Blocks in `python` run in one process. Blocks in another
language only show something. A line `<!-- not run: REASON -->` before a block leaves it out.

The environment has the wheels of all packages, on top of the third-party distributions of this environment. Three commands
are replaced, as running them would take the time of a lane or the network: `hatch` and `pip` check that what they are given
exists (`hatch run PROGRAM` runs the program), and `.ci/run` of the copy does nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/index.md",
    "docs/first-ten-minutes.md",
    "docs/faq.md",
    "docs/slurm.md",
    "configs/README.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/internals/*.md")),
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("packages/*/README.md")),
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("apps/*/README.md")),
)
RUN = ("bash", "python")
SHOWN = ("text", "toml", "console", "json", "yaml")
_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n)?^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A block of a page. reason: why it is not run, or None."""

    page: str
    line: int
    language: str
    code: str
    reason: str | None


def blocks_of(page: str) -> list[Block]:
    """All blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, m.start("language")) + 1, m["language"], m["code"], m["reason"])
        for m in _FENCE.finditer(text)
    ]  # fmt: skip


class BlockError(AssertionError):
    """A block that failed, with its output."""


# ---- the environment


def wheels(folder: Path) -> list[Path]:
    """A wheel of each package with the files of the sources: those of `dist` if they are current, else new ones."""
    sources = sorted([*ROOT.glob("packages/*"), *ROOT.glob("apps/*")])
    found = {source: wheel for source in sources if (wheel := _current_wheel(source))}
    missing = [str(source) for source in sources if source not in found]
    if missing:
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), *missing]
        subprocess.run(pip, check=True)
    return [*found.values(), *folder.glob("*.whl")]


def _current_wheel(source: Path) -> Path | None:
    """The wheel in `dist` whose modules have the bytes of those in `source`."""
    (package,) = (p for p in (source / "src").iterdir() if (p / "__init__.py").exists())
    for wheel in (ROOT / "dist").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = {n for n in archive.namelist() if n.startswith(f"{package.name}/")}
            files = [p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
            inside = {str(p.relative_to(package.parent)): p for p in files}
            if names == inside.keys() and all(
                archive.read(n) == inside[n].read_bytes() for n in names
            ):
                return wheel
    return None


def make_environment(folder: Path) -> Path:
    """A virtual environment with the wheels, `hatch` and `pip` replaced; its folder."""
    home = folder / "venv"
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    built = wheels(folder)
    install = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), "-q", "--disable-pip-version-check",
               "install", "--no-deps", "--no-index", *map(str, built)]  # fmt: skip
    subprocess.run(install, check=True)

    # A folder that a .pth names is on the path, but its own .pth files, those of editable packages, are not read.
    third_party = next(p for p in sys.path if p.endswith("site-packages"))
    (site / "third_party.pth").write_text(f"{third_party}\n")
    for name in ("hatch", "pip"):
        _write_program(home / "bin" / name, f'{sys.executable} {__file__} --as-{name} {home} "$@"')
    _write_program(home / "bin/torchrun", f'exec {home}/bin/python -m torch.distributed.run "$@"')
    return home


def _write_program(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def make_checkout(folder: Path, home: Path) -> Path:
    """A copy of the checkout without tests, in which `.venv` is the environment and the main job has run."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True,
                            text=True).stdout  # fmt: skip
    for name in listed.splitlines():
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".ci/run").write_text("true\n")
    (folder / ".venv").symlink_to(home)
    shutil.copytree(ROOT / "runs/debug", folder / "runs/debug")
    return folder


def require_main_job(home: Path) -> None:
    """Run the main job in this checkout, unless `runs/debug` holds its result."""
    job = "apps/train/configs/debug.toml"
    if not (ROOT / "runs/debug/checkpoints/step-00000600").exists():
        subprocess.run(
            [home / "bin/forge-train", "run", job], cwd=ROOT, check=True, capture_output=True
        )


# ---- the commands that are replaced


def as_hatch(home: Path, args: list[str]) -> int:
    """`hatch` as printed: a program runs, a script or a lane must exist with its options."""
    import tomllib

    environments = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]
    verb, *rest = args
    if verb == "test":
        return _missing(p for p in rest if not p.startswith("-") and not (ROOT / p).exists())
    assert verb == "run", verb
    name, *options = rest
    environment, _, script = name.rpartition(":")
    scripts = environments[environment or "default"].get("scripts", {})
    if script in scripts:
        dev = environments["dev"]["scripts"].get(script, scripts[script])
        file = re.search(r"python (?:-m )?([\w./]+)", dev if isinstance(dev, str) else "")
        path = file and ROOT / (
            file[1] if file[1].endswith(".py") else file[1].replace(".", "/") + ".py"
        )
        text = path.read_text() if path and path.is_file() else ""
        return _missing(
            o for o in options if o.startswith("--") and f'"{o.partition("=")[0]}"' not in text
        )
    return subprocess.run(
        [script, *options], env={**os.environ, "PATH": f"{home}/bin:{os.environ['PATH']}"}
    ).returncode


def as_pip(args: list[str]) -> int:
    """`pip install` as printed: a folder must be a package with that extra, a name must be one that constraints.txt pins."""
    import tomllib

    known = {
        re.split("==", line)[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    } | {"hatch"}
    verb, *targets = args
    missing = [] if verb == "install" else [verb]
    for target in targets:
        if target.startswith("-"):
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
    return _missing(missing)


def _missing(names: Iterator[str] | list[str]) -> int:
    found = list(names)
    for name in found:
        print(name, "is missing", file=sys.stderr)
    return len(found)


# ---- running


_PYTHON = """
import json, sys
names = {"__name__": "__main__"}
for line in sys.stdin:
    place, code = json.loads(line)
    exec(compile(code, place, "exec"), names)
    print("block done", file=sys.stderr, flush=True)
"""


class Reader:
    """Copies the blocks of a page into a terminal and a Python process."""

    def __init__(self, home: Path, checkout: Path, user: Path) -> None:
        self._checkout, self._state = checkout, user / "state"
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("FORGE_", "PYTEST_", "PYTHON"))
        }
        self._environ = {
            **kept, "HOME": str(user), "PATH": f"{home}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "NO_COLOR": "1",
        }  # fmt: skip
        self._state.write_text(f"cd {checkout}\n")
        self._python: subprocess.Popen[str] | None = None
        self._log = (user / "python.log").open("w+")

    def read(self, block: Block) -> None:
        """Run one block; BlockError if it fails."""
        (self._bash if block.language == "bash" else self._exec)(block)

    def _bash(self, block: Block) -> None:
        script = (
            f'. {self._state}\n{block.code}\n{{ export -p; echo cd "$PWD"; }} > {self._state}\n'
        )
        done = subprocess.run(["bash", "-e", "-c", script], cwd=self._checkout, env=self._environ, text=True, timeout=180,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)  # fmt: skip
        if done.returncode:
            raise BlockError(
                f"{block.page}:{block.line} ends with {done.returncode}\n{done.stdout[-3000:]}"
            )

    def _exec(self, block: Block) -> None:
        if self._python is None:
            self._python = subprocess.Popen(
                [Path(self._environ["PATH"].split(":")[0], "python"), "-c", _PYTHON],
                cwd=self._checkout, env=self._environ, text=True, stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.PIPE,
            )  # fmt: skip
        assert self._python.stdin
        assert self._python.stderr
        place = f"{block.page}:{block.line}"
        self._python.stdin.write(json.dumps([place, block.code]) + "\n")
        self._python.stdin.flush()
        said = []
        for line in self._python.stderr:
            if line == "block done\n":
                return
            said.append(line)
        self._python.wait()
        raise BlockError(f"{place} fails\n{''.join(said[-30:])}")

    def close(self) -> None:
        """End the Python process."""
        if self._python is not None:
            self._python.kill()
            self._python.wait()
        self._log.close()


def run_page(page: str, home: Path, folder: Path) -> float:
    """Run all blocks of a page that are to be run; the seconds that they took. BlockError if one fails."""
    checkout, user = folder / "forge", folder / "home"
    user.mkdir(parents=True)
    make_checkout(checkout, home)
    reader = Reader(home, checkout, user)
    began = time.perf_counter()
    try:
        for block in blocks_of(page):
            if block.language in RUN and block.reason is None:
                reader.read(block)
    finally:
        reader.close()
    return time.perf_counter() - began


def main(pages: list[str]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        home = make_environment(Path(temporary))
        require_main_job(home)
        for page in pages or PAGES:
            try:
                print(
                    f"{run_page(page, home, Path(temporary, page.replace('/', '-'))):6.1f} s  {page}",
                    flush=True,
                )
            except BlockError as error:
                failed += 1
                print(f"FAILED  {error}", flush=True)
    for page in pages or PAGES:
        for block in blocks_of(page):
            if block.reason:
                print(f"not run: {page}:{block.line}: {block.reason}")
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-hatch"]:
        sys.exit(as_hatch(Path(sys.argv[2]), sys.argv[3:]))
    if sys.argv[1:2] == ["--as-pip"]:
        sys.exit(as_pip(sys.argv[3:]))
    sys.exit(main(sys.argv[1:]))

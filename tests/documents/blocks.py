"""Run the blocks of a page as printed, as a reader would who copies them from top to bottom.

    python -m tests.documents.blocks              # all pages: the seconds of each, and the blocks that are not run
    python -m tests.documents.blocks README.md    # one

Blocks in `bash` run one after another in a copy of the checkout without `tests/`, in which `runs/debug` holds the result of
`hatch run train`; variables and the folder last from block to block. Blocks in `python` run in one process. Blocks in another
language only show something. What a line `print(...)  # TEXT` prints must be TEXT, or its part before a `,`, `;` or `:`, if TEXT
begins as a value of Python does; other comments are prose. A line `<!-- not run: REASON -->` before a block leaves it out, for one of REASONS.

After a line `<!-- needs Slurm -->` a block runs next to a Slurm of our own (tests/slurm/cluster.py), and the jobs that its page
submits must end well. The tests leave these blocks out. This command starts that Slurm, and fails where it cannot.

The environment has the wheels of all packages and the harness, on top of the third-party distributions of this environment. Three commands
are replaced, as running them would take the time of a lane or the network: `hatch` and `pip` check that what they are given
exists (commands.py; `hatch run PROGRAM` runs the program), and `.ci/run` of the copy does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import venv
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.slurm.cluster import Slurm, running_cluster

ROOT = Path(__file__).resolve().parents[2]
#: Pages that `.ci/run` reads; `pages` has all.
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/index.md",
    "docs/install.md",
    "docs/first-ten-minutes.md",
    "docs/own-text.md",
    "docs/several-ranks.md",
    "docs/faq.md",
    "docs/slurm.md",
    "configs/README.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/internals/*.md")),
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("packages/*/README.md")),
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("apps/*/README.md")),
)
COMMANDS = ROOT / "tests/documents/commands.py"
RUN = ("bash", "python")
SHOWN = ("text", "toml", "console", "json", "yaml")
REASONS = ("needs a GPU", "needs the Hub", "needs a cluster")
_FENCE = re.compile(
    r"(?:^<!-- (?:not run: (?P<reason>[^\n]+?)|(?P<slurm>needs Slurm)) -->\n)?"
    r"^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_PRINTED = re.compile(
    r"^ *print\(.*\)  # ((?:b?['\"]|[\[({\d-]|(?:True|False|None|[a-z_.]+\()).*)$", re.MULTILINE
)
_BLOCK_SECONDS = 600.0
_AT_ONCE = 2


class Block(NamedTuple):
    """A block of a page. reason: why it is not run, or None."""

    page: str
    line: int
    language: str
    code: str
    reason: str | None = None
    needs_slurm: bool = False

    @property
    def runs(self) -> bool:
        return self.language in RUN and self.reason is None


def files() -> list[str]:
    """The files of the checkout that git has or would add."""
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    found = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in found.splitlines() if (ROOT / name).is_file()]


def pages() -> list[str]:
    """All pages: each Markdown file of the checkout."""
    return sorted(name for name in files() if name.endswith(".md"))


def blocks_of(page: str) -> list[Block]:
    """All blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, m.start("language")) + 1, m["language"], m["code"], m["reason"], bool(m["slurm"]))
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
    (site / "third_party.pth").write_text(f"{third_party}\n{ROOT}/tests/harness/src\n")
    for name in ("hatch", "pip"):
        _write_program(home / "bin" / name, f'{sys.executable} {COMMANDS} --as-{name} {home} "$@"')
    _write_program(home / "bin/torchrun", f'exec {home}/bin/python -m torch.distributed.run "$@"')
    return home


def _write_program(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def make_checkout(folder: Path, home: Path) -> Path:
    """A copy of the checkout without tests, in which `.venv` is the environment and the main job has run."""
    for name in files():
        # null-gpu.md copies its folder
        if not name.startswith("tests/") or name.startswith("tests/null_gpu/"):
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


# ---- running


_PYTHON = """
import json, sys
names = {"__name__": "__main__"}
for line in sys.stdin:
    place, code = json.loads(line)
    exec(compile(code, place, "exec"), names)
    sys.stdout.flush()
    print("block done", file=sys.stderr, flush=True)
"""


class Reader:
    """Copies the blocks of a page into a terminal and a Python process."""

    def __init__(
        self, home: Path, checkout: Path, user: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self._checkout, self._state = checkout, user / "state"
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("FORGE_", "PYTEST_", "PYTHON"))
        }
        self._environ = {
            **kept, "HOME": str(user), "PATH": f"{home}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "NO_COLOR": "1", **(environ or {}),
        }  # fmt: skip
        self._state.write_text(f"cd {checkout}\n")
        self._python: subprocess.Popen[str] | None = None
        self._log = (user / "python.log").open("w")
        self._printed = (user / "python.log").open()  # an offset of its own

    def read(self, block: Block) -> None:
        """Run one block; BlockError if it fails."""
        (self._bash if block.language == "bash" else self._exec)(block)

    def _bash(self, block: Block) -> None:
        script = (
            f'. {self._state}\n{block.code}\n{{ export -p; echo cd "$PWD"; }} > {self._state}\n'
        )
        done = subprocess.run(["bash", "-e", "-c", script], cwd=self._checkout, env=self._environ, text=True, timeout=_BLOCK_SECONDS,
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
        timer = threading.Timer(_BLOCK_SECONDS, self._python.kill)
        timer.start()
        try:
            for line in self._python.stderr:
                if line == "block done\n":
                    self._compare(block)
                    return
                said.append(line)
        finally:
            timer.cancel()
        self._python.wait()
        raise BlockError(f"{place} fails\n{''.join(said[-30:])}")

    def _compare(self, block: Block) -> None:
        """BlockError unless the output of a block has each text that it says it prints."""
        lines = self._printed.read().splitlines()
        for text in _PRINTED.findall(block.code):
            if not any(line and re.match(re.escape(line) + r"(?:$|[,;:])", text) for line in lines):
                output = "\n".join(lines[-30:])
                raise BlockError(f"{block.page}:{block.line} does not print {text}\n{output}")

    def close(self) -> None:
        """End the Python process."""
        if self._python is not None:
            self._python.kill()
            self._python.wait()
        self._log.close()
        self._printed.close()


def run_page(page: str, home: Path, folder: Path, slurm: Slurm | None = None) -> float:
    """Run all blocks of a page that are to be run; the seconds that they took. BlockError if one fails."""
    checkout, user = folder / "forge", folder / "home"
    user.mkdir(parents=True)
    make_checkout(checkout, home)
    environ = {} if slurm is None else {"SLURM_CONF": slurm.environ["SLURM_CONF"]}
    reader = Reader(home, checkout, user, environ)

    began = time.perf_counter()
    try:
        for block in blocks_of(page):
            if block.runs and (slurm or not block.needs_slurm):
                reader.read(block)
        if slurm and any(block.needs_slurm for block in blocks_of(page)):
            _wait_for_jobs(slurm, page, checkout)
    finally:
        reader.close()
    return time.perf_counter() - began


def _wait_for_jobs(slurm: Slurm, page: str, checkout: Path) -> None:
    """Wait for the jobs that were submitted in a checkout; BlockError if one fails."""
    for job in slurm.run("squeue", "--noheader", "--states=all", "--format=%A").split():
        if slurm.job(job)["WorkDir"].startswith(str(checkout)):
            state = slurm.wait_for_end(job, _BLOCK_SECONDS)
            if state != "COMPLETED":
                log = Path(slurm.job(job)["StdOut"])
                told = log.read_text(errors="replace")[-3000:] if log.is_file() else "no output"
                raise BlockError(f"{page}: job {job} is {state}\n{told}")


def main(chosen: list[str]) -> int:
    """Run pages, two at a time; the number that failed."""
    found = {page: blocks_of(page) for page in chosen or pages()}
    to_run = [page for page, blocks in found.items() if any(block.runs for block in blocks)]
    needs_slurm = any(block.needs_slurm for blocks in found.values() for block in blocks)
    began, failed = time.perf_counter(), 0

    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        home = make_environment(temporary)
        require_main_job(home)
        slurm = stack.enter_context(running_cluster(temporary)) if needs_slurm else None

        def read(page: str) -> tuple[str, bool]:
            try:
                seconds = run_page(page, home, temporary / page.replace("/", "-"), slurm)
            except (BlockError, subprocess.TimeoutExpired) as error:
                return f"FAILED  {page}: {error}", False
            return f"{seconds:6.1f} s  {page}", True

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for line, passed in pool.map(read, to_run):
                failed += not passed
                print(line, flush=True)

    left_out = [b for blocks in found.values() for b in blocks if b.reason]
    for block in left_out:
        print(f"not run: {block.page}:{block.line}: {block.reason}")
    print(f"{sum(b.runs for blocks in found.values() for b in blocks)} blocks of {len(to_run)} pages in "
          f"{time.perf_counter() - began:.0f} s, {len(left_out)} not run, {failed} pages failed")  # fmt: skip
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

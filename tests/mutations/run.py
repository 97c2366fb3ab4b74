"""Plant one mistake at a time in a copy of the tree; the tests that it names must fail.

`hatch run mutations` tries all of them, `hatch run mutations "learning rate"` those whose name holds the
text. One line each; exit code 1 if a mistake survives. Only tests of the newcomer's lane count
(`not slow`), so a mistake that is caught here is caught by `hatch test`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mistakes import MISTAKES, Mistake

ROOT = Path(__file__).resolve().parents[2]
_TESTS_FAILED = 1  # pytest's code; a collection error or an empty selection has another one
_LIMIT_SECONDS = 900.0  # a mistake may make ranks wait for each other: that is seen, too


def copy_of_tree(target: Path) -> dict[str, str]:
    """The files that git knows or would add, and an environment in which Python imports from there."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in files.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    sources = [
        *target.glob("packages/*/src"),
        target / "apps/train/src",
        target / "tests/harness/src",
    ]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}


def tests_pass(tests: Iterable[str], tree: Path, environ: dict[str, str]) -> bool:
    """Whether the tests are green as the tree stands; ranks that wait for each other are not."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    run = partial(subprocess.run, cwd=tree, env=environ, capture_output=True, text=True)
    try:
        done = run(command, timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, _TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}")
    return done.returncode == 0


def survives(mistake: Mistake, tree: Path, environ: dict[str, str]) -> bool:
    """Whether the named tests stay green with the mistake in place."""
    path = tree / mistake.file
    right = path.read_text()
    path.write_text(right.replace(mistake.right, mistake.wrong))
    try:
        return tests_pass(mistake.tests, tree, environ)
    finally:
        path.write_text(right)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="", help="part of a mistake's name")
    chosen = [m for m in MISTAKES if parser.parse_args().part in m.name]
    alive = 0
    with tempfile.TemporaryDirectory(prefix="forge-mutations-") as folder:
        environ = copy_of_tree(Path(folder))
        tests = sorted({test for mistake in chosen for test in mistake.tests})
        if not tests_pass(tests, Path(folder), environ):
            print("the tests fail without a mistake; run them first")
            return 1
        for mistake in chosen:
            began = time.monotonic()
            survived = survives(mistake, Path(folder), environ)
            alive += survived
            verdict = "SURVIVED" if survived else "caught"
            print(f"{verdict:9} {time.monotonic() - began:5.0f} s  {mistake.name}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} caught")
    return bool(alive or not chosen)


if __name__ == "__main__":
    sys.exit(main())

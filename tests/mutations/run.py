"""Plant one mistake at a time in a copy of the tree, and see whether the tests of a lane fail.

    hatch run mutations --lane ci                 # all mistakes against the tests of .ci/run
    hatch run mutations --lane test               # the tests marked `test`, and those that `hatch test` selects
    hatch run mutations --lane test "epoch"       # mistakes whose name contains the text
    hatch run mutations --lane test --check 7     # ten mistakes drawn by a seed, against the whole lane

One run of the lane in a copy finds which tests execute each mistake (hits.py; kept for the next command while the
sources are the same). Then each mistake runs only these, shortest first, up to the first failure; a test that exceeds
its time limit fails. A line that runs at import selects all tests that execute anything in its file. The result is
written to docs/data/mutations.json. Exit code 1 if the text of a mistake is no longer found, if the lane fails without
a mistake, or if the lane misses one that it must catch: `ci` all but those of which mistakes.py says that no test sees
them, `test` more than 15 % of them.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import hits
from hits import Site
from mistakes import MISTAKES, Mistake
from run_tests import selected_by

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/data/mutations.json"
LANES = ("test", "quick", "ci")
_RANK = {lane: number for number, lane in enumerate((*LANES, "slow"))}
_TEST_FAILED, _NOTHING_LEFT = 1, 5  # exit codes of pytest; an error in collecting the tests is 2
_CHUNKS = (
    20,
    200,
    100_000,
)  # tests of one pytest process: the first starts fast, the last is seldom needed
_WORKERS = 2


def files_of_tree() -> list[str]:
    """The files that git tracks or would add."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted({name for name in found.splitlines() if (ROOT / name).is_file()})


def copy_of_tree(target: Path) -> dict[str, str]:
    """Copy the tree, and return an environment in which Python imports from the copy."""
    for name in files_of_tree():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)
    sources = [
        *sorted(target.glob("packages/*/src")),
        *sorted(target.glob("apps/*/src")),
        target / "tests/harness/src",
        target / "tests/mutations",
    ]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "FORGE_"))}
    return {**environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}


def digest_of_tree() -> str:
    found = hashlib.sha256()
    for name in files_of_tree():
        if name.endswith((".py", ".toml")) and name.startswith(
            ("packages", "apps", "tests", "conf", "py")
        ):
            found.update(name.encode() + (ROOT / name).read_bytes())
    return found.hexdigest()[:16]


def check_texts(mistakes: Iterable[Mistake]) -> None:
    """Raise SystemExit if the text of a mistake does not occur exactly once."""
    moved = [m.name for m in mistakes if (ROOT / m.file).read_text().count(m.right) != 1]
    if moved:
        sys.exit("these mistakes no longer fit their files; port them:\n  " + "\n  ".join(moved))


# ---- which tests execute what


def record(lane: str, mistakes: Iterable[Mistake]) -> dict[str, Any]:
    """Run the lane once with planted calls: the tests by the sites that they execute, and each test's row."""
    kept = ROOT / "runs/mutations" / f"hits-{lane}-{digest_of_tree()}-{_digest(mistakes)}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="forge-hits-") as folder:
        tree, notes = Path(folder, "tree"), Path(folder, "hits")
        notes.mkdir()
        environ = copy_of_tree(tree)
        at_import = instrument(tree, mistakes)
        environ |= {"FORGE_HITS": str(notes), "FORGE_RECORD": f"{folder}/tests.json"}
        command = [sys.executable, "-m", "pytest", "-p", "recorder", "-p", "no:cacheprovider", "-q",
                   f"-n{_WORKERS}", "--dist=loadfile", "--no-loadscope-reorder",
                   "--lane", lane, "packages", "apps", "tests"]  # fmt: skip
        done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)
        if done.returncode not in (0, _TEST_FAILED):
            sys.exit(
                f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
            )
        tests = json.loads(Path(folder, "tests.json").read_text())
        sites: dict[str, set[str]] = defaultdict(set)
        for note in notes.iterdir():
            for line in note.read_text().splitlines():
                site, _, test = line.partition("\t")
                sites[site].add(test.rpartition(" (")[0])
    for name, file in at_import.items():
        sites[name] = set().union(*(t for s, t in sites.items() if s.startswith(f"{file}::")))
    found = {
        "seconds": round(time.monotonic() - began),
        "tests": tests,
        "sites": {name: sorted(found & tests.keys()) for name, found in sites.items()},
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found))
    return found


def _digest(mistakes: Iterable[Mistake]) -> str:
    return hashlib.sha256(repr(sorted(mistakes)).encode()).hexdigest()[:8]


def instrument(tree: Path, mistakes: Iterable[Mistake]) -> dict[str, str]:
    """Plant calls in all sources of the copy; of the mistakes whose line runs at import, the file."""
    by_file: dict[str, list[Mistake]] = defaultdict(list)
    for mistake in mistakes:
        by_file[mistake.file].append(mistake)
    hits.write_module(tree / "tests/harness/src")
    at_import: dict[str, str] = {}
    for path in [*tree.glob("packages/*/src/**/*.py"), *tree.glob("apps/*/src/**/*.py")]:
        file, text = str(path.relative_to(tree)), path.read_text()
        sites = [
            Site(m.name, hits.first_difference(text, m.right, m.wrong))
            for m in by_file.get(file, [])
        ]
        at_import |= dict.fromkeys(hits.plant(path, file, sites), file)
    return at_import


# ---- one mistake


def first_failure(
    mistake: Mistake, tests: dict[str, float], tree: Path, environ: dict[str, str]
) -> str | None:
    """The first test that fails with the mistake in place, shortest first; None if all pass."""
    path = tree / mistake.file
    right = path.read_text()
    path.write_text(right.replace(mistake.right, mistake.wrong))
    try:
        return _first_failure(tests, tree, environ)
    finally:
        path.write_text(right)


def _first_failure(tests: dict[str, float], tree: Path, environ: dict[str, str]) -> str | None:
    left = sorted(tests, key=lambda name: tests[name])
    for size in _CHUNKS:
        chunk, left = left[:size], left[size:]
        if not chunk:
            return None
        with tempfile.TemporaryDirectory() as folder:
            chosen, record = Path(folder, "select.json"), Path(folder, "record.json")
            chosen.write_text(json.dumps({name: tests[name] for name in chunk}))
            files = sorted({name.partition("::")[0] for name in chunk})
            command = [sys.executable, "-m", "pytest", "-p", "recorder", "-p", "no:cacheprovider",
                       "-p", "no:xdist", "-x", "-q", "--lane", "everything", *files]  # fmt: skip
            limit = 120 + sum(max(60.0, 10 * tests[name]) for name in chunk)
            try:
                done = subprocess.run(
                    command,
                    cwd=tree,
                    env={**environ, "FORGE_SELECT": str(chosen), "FORGE_RECORD": str(record)},
                    capture_output=True,
                    text=True,
                    timeout=limit,
                )
            except subprocess.TimeoutExpired:
                return f"{chunk[0]} or a later one (no end in {limit:.0f} s)"
            rows = json.loads(record.read_text()) if record.exists() else {}
            failed = [name for name, row in rows.items() if row["outcome"] == "failed"]
            if failed:
                return failed[0]
            if done.returncode not in (0, _NOTHING_LEFT):  # a mistake that breaks the imports
                return f"{files[0]} or another one (pytest ended with {done.returncode})"
    return None


# ---- all of them


def selections(
    lane: str, recorded: dict[str, Any], mistake: Mistake
) -> dict[str, dict[str, float]]:
    """Of each measured selection of the lane: the tests that execute the mistake, with their seconds."""
    tests = recorded["tests"]
    hit = [n for n in recorded["sites"].get(mistake.name, []) if tests[n]["outcome"] == "passed"]
    seconds = {name: tests[name]["seconds"] for name in hit}

    def of(lanes: str) -> dict[str, float]:
        return {n: s for n, s in seconds.items() if _RANK[tests[n]["lane"]] <= _RANK[lanes]}

    if lane != "test":
        return {lane: of(lane)}
    folders = selected_by([mistake.file]).whole
    change = {n: s for n, s in of("quick").items() if n.startswith(tuple(f"{f}/" for f in folders))}
    return {"test": of("test"), "hatch test": {**change, **of("test")}}


def measure(
    lane: str, recorded: dict[str, Any], mistakes: list[Mistake]
) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="forge-mutations-") as folder:
        free: SimpleQueue[tuple[Path, dict[str, str]]] = SimpleQueue()
        for number in range(_WORKERS):
            tree = Path(folder, str(number))
            free.put((tree, {**copy_of_tree(tree), "OMP_NUM_THREADS": "1"}))

        def one(mistake: Mistake) -> None:
            tree, environ = free.get()
            try:
                for name, tests in selections(lane, recorded, mistake).items():
                    began = time.monotonic()
                    test = first_failure(mistake, tests, tree, environ) if tests else None
                    seconds = round(time.monotonic() - began, 1)
                    verdict = "caught" if test else "missed"
                    rows[name].append({"mistake": mistake.name, "package": package_of(mistake),
                                       "verdict": verdict, "test": test, "executed_by": len(tests),
                                       "seconds": seconds, "seen": mistake.seen})  # fmt: skip
                    print(
                        f"{name:10} {verdict} {seconds:5.0f} s  {mistake.name}  {test or ''}",
                        flush=True,
                    )
            finally:
                free.put((tree, environ))

        with ThreadPoolExecutor(_WORKERS) as pool:
            list(pool.map(one, mistakes))
    order = {m.name: i for i, m in enumerate(mistakes)}
    return {n: sorted(found, key=lambda row: order[row["mistake"]]) for n, found in rows.items()}


def package_of(mistake: Mistake) -> str:
    return "/".join(mistake.file.split("/")[:2])


def table(rows: list[dict[str, Any]]) -> str:
    """Caught / planted by package, of those that a test sees, and of the others."""
    lines = []
    for package in [*sorted({row["package"] for row in rows}), "all"]:
        mine = [row for row in rows if package in ("all", row["package"])]
        parts = []
        for seen in (True, False):
            these = [row for row in mine if row["seen"] == seen]
            parts.append(f"{sum(r['verdict'] == 'caught' for r in these):3} / {len(these):3}")
        lines.append(f"{package:28} {parts[0]}   unseen by any test: {parts[1]}")
    return "\n".join(lines)


def check_against_lane(
    lane: str, rows: list[dict[str, Any]], mistakes: list[Mistake], seed: int, failed: list[str]
) -> bool:
    """Run the whole lane with ten mistakes; whether each verdict is that of the selected tests.

    Without the tests that fail without a mistake, and without test_mistakes.py, which fails wherever one is planted.
    """
    drawn = random.Random(seed).sample(mistakes, min(10, len(mistakes)))
    verdicts = {row["mistake"]: row["verdict"] for row in rows}
    same = True
    with tempfile.TemporaryDirectory(prefix="forge-mutations-") as folder:
        environ = copy_of_tree(Path(folder))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
                   "--ignore=tests/mutations/test_mistakes.py", *(f"--deselect={name}" for name in failed),
                   f"-n{_WORKERS}", "--dist=loadfile", "--no-loadscope-reorder",
                   "--lane", lane, "packages", "apps", "tests"]  # fmt: skip
        for mistake in drawn:
            path = Path(folder) / mistake.file
            right = path.read_text()
            path.write_text(right.replace(mistake.right, mistake.wrong))
            done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
            path.write_text(right)
            verdict = "missed" if done.returncode == 0 else "caught"
            same &= verdict == verdicts[mistake.name]
            print(
                f"whole lane {verdict}, selected {verdicts[mistake.name]}  {mistake.name}",
                flush=True,
            )
    return same


def load_mistakes(path: str) -> list[Mistake]:
    """`MISTAKES` of a Python file."""
    spec = importlib.util.spec_from_file_location("more_mistakes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.MISTAKES)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", default="", help="part of a mistake's name")
    parser.add_argument("--lane", choices=LANES, default="test")
    parser.add_argument(
        "--mistakes", metavar="FILE", help="plant MISTAKES of this file instead; writes no result"
    )
    parser.add_argument(
        "--recorded", choices=LANES, help="take the lines from a run of this larger lane"
    )
    parser.add_argument(
        "--check", type=int, metavar="SEED", help="also run the whole lane with ten of them"
    )
    args = parser.parse_args()
    every = load_mistakes(args.mistakes) if args.mistakes else list(MISTAKES)
    check_texts(every)
    chosen = [m for m in every if args.part in m.name]
    if not chosen:
        sys.exit(f"no mistake has {args.part!r} in its name")
    began = time.monotonic()
    larger = args.recorded or ("quick" if args.lane == "test" else args.lane)
    recorded = record(larger, every)
    failed = sorted(n for n, row in recorded["tests"].items() if row["outcome"] == "failed")
    print(f"{len(recorded['tests'])} tests of lane {larger} in {recorded['seconds']} s; "
          f"failed without a mistake: {', '.join(failed) or 'none'}", flush=True)  # fmt: skip
    found = measure(args.lane, recorded, chosen)
    for name, rows in found.items():
        print(f"\n{name}: caught / planted\n{table(rows)}")
    same = True
    if args.check is not None:
        same = check_against_lane(args.lane, found[args.lane], chosen, args.check, failed)
    minutes = (time.monotonic() - began) / 60
    print(f"\n{minutes:.0f} minutes")
    if not args.mistakes and not args.part:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({**known, **found}, indent=1) + "\n")
    return int(not same or any(too_few(name, rows) for name, rows in found.items()))


def too_few(lane: str, rows: list[dict[str, Any]]) -> bool:
    """Whether the lane misses what it must catch."""
    known = [row for row in rows if row["seen"]]
    missed = sum(row["verdict"] == "missed" for row in known)
    return missed > (0 if lane == "ci" else 0.15 * len(known))


if __name__ == "__main__":
    sys.exit(main())

"""Each distribution as it was released, next to the others as they are in the tree with a raised patch version.

A pair is one distribution of a release and another one of the tree. pip resolves it among the wheels of both: it must reject a
pair that the ranges exclude, directly or by what the two need, and a pair that it accepts runs. The released version is that
of scripts/releases.toml, and in a second test the one in the tree, which is the next release.

For the resolver the wheels are copied without modules and without the requirements on distributions of others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from forge_testing.jobs import write_job

ROOT = Path(__file__).resolve().parents[2]
RELEASES = tomllib.loads((ROOT / "scripts/releases.toml").read_text())

#: Finds each public name of the distributions, then trains a job where the runner is one of them.
PROGRAM = """
import importlib, importlib.metadata, json, sys
for module, (name, version) in json.loads(sys.argv[1]).items():
    assert importlib.metadata.version(name) == version, (name, version)
    found = importlib.import_module(module)
    for public in getattr(found, "__all__", ()):
        getattr(found, public)
if "forge_train" in sys.modules:
    from forge_train.cli import main
    main(["run", sys.argv[2]])
"""


class Wheels:
    """Wheels of releases and of the tree, by (distribution, version)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[tuple[str, str], Path] = {}
        self.requires: dict[tuple[str, str], list[Requirement]] = {}
        (folder / "ranges").mkdir()
        target = folder / "hatchling"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", target, "hatchling"]
        subprocess.run(pip, check=True)  # once, and not for each wheel

        self.python = folder / "venv/bin/python"
        venv.create(folder / "venv", with_pip=False)
        (site,) = folder.glob("venv/lib/python*/site-packages")
        # the .pth files there, those of editable packages, are not read
        third_party = next(p for p in sys.path if p.endswith("site-packages"))
        (site / "third_party.pth").write_text(f"{third_party}\n")

    def add(self, sources: Path) -> dict[str, str]:
        """Build the distributions below `sources`; their names and versions."""
        added = {}
        for file in sorted([*sources.glob("packages/*/pyproject.toml"), *sources.glob("apps/*/pyproject.toml")]):  # fmt: skip
            project = tomllib.loads(file.read_text())["project"]
            name, version = project["name"], project["version"]
            added[name] = version
            target = self.folder / f"{name}-{version}"
            command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", target]
            environ = {**os.environ, "PYTHONPATH": str(self.folder / "hatchling")}
            subprocess.run(command, cwd=file.parent, env=environ, check=True, capture_output=True)

            (wheel,) = target.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
            self.found[name, version] = target
            self._write_ranges(name, version, wheel.name)
            wheel.unlink()
        return added

    def _write_ranges(self, name: str, version: str, file: str) -> None:
        (info,) = self.found[name, version].glob("*.dist-info")
        lines = Parser().parsestr((info / "METADATA").read_text())
        all_of_them = [Requirement(text) for text in lines.get_all("Requires-Dist", [])]
        ours = [r for r in all_of_them if r.name.startswith("forge-") and r.marker is None]
        self.requires[name, version] = ours
        text = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
        text += "".join(
            f"Provides-Extra: {extra}\n" for extra in lines.get_all("Provides-Extra", [])
        )
        text += "".join(f"Requires-Dist: {r}\n" for r in ours)
        with zipfile.ZipFile(self.folder / "ranges" / file, "w") as archive:
            archive.writestr(f"{info.name}/METADATA", text)
            archive.write(info / "WHEEL", f"{info.name}/WHEEL")
            archive.writestr(f"{info.name}/RECORD", "")

    def resolve(self, pins: dict[str, str]) -> dict[str, str] | None:
        """What pip would install with these versions; None where it rejects them."""
        pip = [sys.executable, "-m", "pip", "--isolated", "install", "-q", "--dry-run", "--ignore-installed",
               "--no-index", "--find-links", self.folder / "ranges", "--report", "-",
               *(f"{name}=={version}" for name, version in pins.items())]  # fmt: skip
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            return None
        rows = [row["metadata"] for row in json.loads(done.stdout)["install"]]
        return {row["name"]: row["version"] for row in rows}

    def fit(self, pins: dict[str, str]) -> bool:
        """Is there a version of all that these need with which each range holds? By trying them."""
        needed = [r for pair in pins.items() for r in self.requires[pair]]
        if any(r.name in pins and not r.specifier.contains(pins[r.name]) for r in needed):
            return False
        left = [r.name for r in needed if r.name not in pins]
        return not left or any(
            self.fit({**pins, left[0]: v}) for n, v in self.found if n == left[0]
        )

    def run(self, chosen: dict[str, str], job: Path) -> None:
        """Run PROGRAM with these versions on the path, before all else."""
        folders = [self.found[pair] for pair in chosen.items()]
        modules = [next(p.parent.name for p in f.glob("*/__init__.py")) for f in folders]
        listed = json.dumps(dict(zip(modules, chosen.items(), strict=True)))
        environ = {**os.environ, "PYTHONPATH": ":".join(map(str, folders))}
        command = [self.python, "-P", "-c", PROGRAM, listed, str(job)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, f"{chosen}\n{done.stderr}"

    def run_pairs(
        self, released: dict[str, str], tree: dict[str, str], folder: Path
    ) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        """(pairs that ran, pairs that pip rejected)."""
        ran, rejected = set(), set()
        for old, version in released.items():
            pins = {old: version} | {name: v for name, v in tree.items() if name != old}
            chosen = self.resolve(pins)
            if chosen is None:  # without those that pip rejects next to the old one
                refused = [n for n in pins if n != old and not self.resolve({old: version, n: pins[n]})]  # fmt: skip
                rejected |= {(old, name) for name in refused}
                pins = {n: v for n, v in pins.items() if n not in refused}
                chosen = self.resolve(pins)
                assert chosen is not None
            assert pins.items() <= chosen.items()
            if pins.keys() == {old}:
                continue
            work = folder / f"{old}-{version}"
            work.mkdir()
            self.run(chosen, write_job(work))
            ran |= {(old, name) for name in pins if name != old}
        return ran, rejected


@pytest.fixture(scope="module")
def built(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Wheels, dict[str, str], dict[str, str]]:
    """Wheels, and the distributions of the tree as they are and with a raised patch version."""
    folder = tmp_path_factory.mktemp("skew")
    (folder / "wheels").mkdir()
    wheels = Wheels(folder / "wheels")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "packages", "apps"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout  # fmt: skip
    for name in listed.splitlines():
        if "/src/" in name or name.count("/") == 2:
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    tree = wheels.add(folder / "tree")

    for file in (folder / "tree").glob("*/*/pyproject.toml"):
        raised = re.sub(
            r'^(version = "\d+\.\d+\.)(\d+)',
            lambda m: f"{m[1]}{int(m[2]) + 1}",
            file.read_text(),
            flags=re.M,
        )
        file.write_text(raised)
    return wheels, tree, wheels.add(folder / "tree")


@pytest.mark.slow
def test_the_next_release_goes_with_later_patches(
    built: tuple[Wheels, dict[str, str], dict[str, str]], tmp_path: Path
) -> None:
    wheels, tree, raised = built
    ran, rejected = wheels.run_pairs(tree, raised, tmp_path)
    assert rejected == set()
    assert len(ran) == len(tree) * (len(tree) - 1)
    print(f"{len(ran)} pairs ran")


@pytest.mark.slow
def test_the_last_releases_run_next_to_the_tree_or_are_rejected(
    built: tuple[Wheels, dict[str, str], dict[str, str]], tmp_path: Path
) -> None:
    wheels, _, raised = built
    for commit in {row["commit"] for row in RELEASES.values()}:
        if subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT).returncode:
            pytest.skip("a shallow clone has no commits of releases")
        sources = tmp_path / commit
        sources.mkdir()
        archive = subprocess.run(["git", "archive", commit, "packages", "apps"], cwd=ROOT, check=True, capture_output=True).stdout  # fmt: skip
        subprocess.run(["tar", "-x", "-C", sources], input=archive, check=True)
        for folder in [*sources.glob("packages/*"), *sources.glob("apps/*")]:
            name = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]
            if RELEASES.get(name, {}).get("commit") != commit:
                shutil.rmtree(folder)
        wheels.add(sources)

    released = {name: row["version"] for name, row in RELEASES.items()}
    ran, rejected = wheels.run_pairs(released, raised, tmp_path)
    pairs = {(old, name) for old in released for name in raised if name != old}
    assert ran | rejected == pairs
    assert ran == {
        (old, name) for old, name in pairs if wheels.fit({old: released[old], name: raised[name]})
    }
    assert len(ran) > 0
    print(f"{len(ran)} pairs ran, {len(rejected)} were rejected")

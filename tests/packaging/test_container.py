"""The container images: their two files agree, and the RUN lines of Dockerfile make an environment that trains.

No image is built. A stage is a folder here, whose paths stand for those of the image; an empty virtual environment stands for the
Python of the base image. `apt-get` and `useradd` change the machine: scripts that write down their arguments stand for them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import string
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
APPTAINER = (ROOT / "apptainer.def").read_text()

_STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "{root}/commands"
for last; do :; done
if [ "$(basename "$0")" = useradd ]; then mkdir -p "{root}/home/$last"; fi
"""


def _instructions() -> list[tuple[str, str]]:
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.M)).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line)]  # fmt: skip


def _section(name: str) -> list[str]:
    """Lines of a section of the definition of Apptainer."""
    found = re.search(rf"^%{name}\n(.*?)(?=^%|\Z)", APPTAINER, re.M | re.S)
    assert found
    return [line.strip() for line in found[1].splitlines() if line.strip()]


def _copy_context(target: Path) -> None:
    """What `docker build .` sends: the names that .dockerignore excepts from `*`, without the last ones."""
    lines = [r for r in (ROOT / ".dockerignore").read_text().splitlines() if not r.startswith("#")]
    kept = [line[1:] for line in lines if line.startswith("!")]
    names = [line[3:] for line in lines if line.startswith("**/")]
    assert lines == ["*", *(f"!{name}" for name in kept), *(f"**/{name}" for name in names)]

    for name in kept:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns(*names))
        else:
            shutil.copy(ROOT / name, target / name)


class Replay:
    """The instructions of Dockerfile in order, in `folder`."""

    def __init__(self, folder: Path, arguments: dict[str, str]) -> None:
        self.root, self.context, self.stages = folder / "image", folder / "context", folder
        self.arguments = arguments
        self.variables: dict[str, str] = {}
        self.user = self.work = self.alias = ""
        self.command: list[str] = []
        self.num_runs = 0
        self.context.mkdir()
        _copy_context(self.context)

    def mapped(self, text: str) -> str:
        """`text` with the paths of the image in the folder of its stage."""
        return re.sub(r"(?<![\w./-])/(src|opt|home|var)\b", rf"{self.root}/\1", text)

    def follow(self, word: str, rest: str) -> None:
        """One instruction."""
        if word == "ARG":
            name, _, default = rest.partition("=")
            self.variables[name] = self.arguments.get(name, default)
        elif word == "FROM":
            self._begin_stage(rest)
        elif word == "COPY":
            self._copy(rest.split())
        elif word == "ENV":
            name, _, value = rest.partition("=")
            self.variables[name] = self.mapped(string.Template(value).substitute(self.variables))
        elif word == "USER":
            self.user = rest
        elif word == "WORKDIR":
            self.work = self.mapped(rest)
        elif word == "RUN":
            self.num_runs += 1
            self.run(["sh", "-ec", self.mapped(rest)])
        else:
            assert word == "CMD", word
            self.command = [self.mapped(part) for part in json.loads(rest)]

    def _begin_stage(self, rest: str) -> None:
        if self.root.exists():
            self.root.rename(self.stages / self.alias)
        self.alias = rest.partition(" AS ")[2]
        venv.create(self.root / "usr/local", with_pip=True)
        for name in ("tmp", "root", "usr/sbin", "home"):
            (self.root / name).mkdir()
        (self.root / "tmp").chmod(0o1777)

        text = _STAND_IN.format(root=self.root)
        for name in ("apt-get", "useradd"):
            (self.root / "usr/sbin" / name).write_text(text)
            (self.root / "usr/sbin" / name).chmod(0o755)
        self.variables = {"PATH": f"{self.root}/usr/local/bin:{self.root}/usr/sbin:/usr/bin:/bin"}
        self.user, self.work = "root", str(self.root)

    def _copy(self, words: list[str]) -> None:
        *options, source, target = words
        if options:
            ((_, _, stage),) = (option.partition("--from=") for option in options)
            start = self.stages / stage / source.lstrip("/")
        else:
            start = self.context / source
        end = Path(self.mapped(target))
        if start.is_dir():
            shutil.copytree(start, end, symlinks=True, dirs_exist_ok=True)
        else:
            end.parent.mkdir(exist_ok=True)
            shutil.copy(start, end)
        for script in (end, end / "scripts/container.sh"):
            if script.suffix == ".sh" and script.is_file():
                script.write_text(self.mapped(script.read_text()))

    def name_of_user(self) -> str:
        """The name that `useradd` gave the number of the user."""
        made = re.findall(
            r"useradd .*--uid (\d+) (\w+)$", (self.root / "commands").read_text(), re.M
        )
        return str(dict(made)[self.user])

    def run(self, command: list[str]) -> None:
        """Run a command as the user of the stage, with nothing of this environment but the settings of pip."""
        left_out = (
            "PYTHONPATH",
            "VIRTUAL_ENV",
            "PIP_CONSTRAINT",
            "PIP_EXTRA_INDEX_URL",
            "PIP_COMPILE",
        )
        home = self.root / ("root" if self.user == "root" else f"home/{self.name_of_user()}")
        environ = {k: v for k, v in os.environ.items() if k not in left_out}
        environ |= self.variables | {"HOME": str(home), "TMPDIR": str(self.root / "tmp")}
        done = subprocess.run(
            command, cwd=self.work, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}"


def _files(root: Path) -> dict[Path, int]:
    """When each file outside the home folder of the user was written."""
    return {
        p: p.lstat().st_mtime_ns
        for p in root.rglob("*")
        if p.is_file() and not p.is_relative_to(root / "home")
    }


@pytest.mark.slow
def test_the_lines_of_the_dockerfile_make_an_environment_that_trains(tmp_path: Path) -> None:
    """Installs torch from the index: `PIP_EXTRA_INDEX_URL`, such as that of the CPU builds, is the build argument."""
    replay = Replay(tmp_path, {"TORCH_INDEX": os.environ.get("PIP_EXTRA_INDEX_URL", "")})
    for word, rest in _instructions():
        replay.follow(word, rest)
    assert replay.num_runs == DOCKERFILE.count("\nRUN ")

    # wheels, and nothing of the sources or of a cache
    root = replay.root
    installed = {p.name.partition("-")[0] for p in root.glob("opt/forge/lib/*/*/forge_*.dist-info")}
    assert len(installed) == len([*ROOT.glob("packages/*"), *ROOT.glob("apps/*")])
    left = [p for name in ("src", "root", "tmp", "home/forge") for p in root.glob(f"{name}/*")]
    # of the first stage, too: the image of Apptainer has one stage
    left += [p for name in ("root", "tmp") for p in (tmp_path / "build").glob(f"{name}/*")]
    assert left == []
    assert not any("editable" in p.name for p in root.glob("opt/forge/lib/*/*/*.pth"))
    commands = (root / "commands").read_text().splitlines()
    assert [c.split()[:2] for c in commands[:-1]] == [["apt-get", "update"], ["apt-get", "install"]]

    # the user of the image may write below its home only; here it is the user of the tests, who may more
    before = _files(root)
    replay.run([*replay.command, "--train.steps", "40"])
    assert _files(root) == before
    assert (root / "home/forge/runs/debug/checkpoints/step-00000040").is_dir()


@pytest.mark.lane("test")
def test_the_images_are_pinned_and_do_not_run_as_root() -> None:
    assert len(DOCKERFILE.splitlines()) < 40
    (digest,) = re.findall(r"^ARG DIGEST=(.+)$", DOCKERFILE, re.M)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
    bases = [rest.partition(" AS ")[0] for word, rest in _instructions() if word == "FROM"]
    assert bases == ["python:${PYTHON}@${DIGEST}"] * 2
    assert [rest for word, rest in _instructions() if word == "USER"] == ["1000"]


@pytest.mark.lane("test")
def test_both_images_have_the_same_base_and_steps() -> None:
    arguments = [rest for word, rest in _instructions() if word == "ARG"]
    assert _section("arguments") == arguments
    step = r"container\.sh ([^&\n]+?)(?: &&|$)"
    steps = re.findall(
        step, "\n".join(rest for word, rest in _instructions() if word == "RUN"), re.M
    )
    of_apptainer = re.sub(r"\{\{ (\w+) \}\}", r"$\1", "\n".join(_section("post")))
    assert sorted(re.findall(step, of_apptainer, re.M)) == sorted(steps)
    assert len(steps) == 2


@pytest.mark.lane("test")
@pytest.mark.parametrize("arguments", [[], ["upgrade"]])
def test_the_script_rejects_other_steps(arguments: list[str]) -> None:
    script = ROOT / "scripts/container.sh"
    assert subprocess.run(["bash", script, *arguments], capture_output=True).returncode == 2


@pytest.mark.lane("test")
@pytest.mark.parametrize("name", ["scripts/container.sh", "scripts/release.sh", ".ci/run"])
def test_shellcheck_reports_nothing(name: str) -> None:
    assert subprocess.run(["shellcheck", ROOT / name]).returncode == 0

"""forge-ckpt ls | inspect | verify: what they print and the codes they end with."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from forge_ckpt import CorruptCheckpoint, Store, cli
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

pytest.importorskip("tyro", reason="of the extra [cli]")
pytest.importorskip("rich", reason="of the extra [cli]")


def run(arguments):
    """Raises what ``cli.main`` prints."""
    from forge_ckpt import cli

    return cli.run(arguments)


@pytest.fixture
def root(tmp_path):
    with Store(tmp_path / "checkpoints") as store:
        for step in (5, 10):
            store.save(step, {"m": {"w": torch.full((20, 30), float(step))}, "cursor": step})
    return tmp_path / "checkpoints"


def call(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def damage(root, step):
    with open(root / f"step-{step:08d}" / "data-0.bin", "r+b") as file:
        file.write(b"\xff")


def test_ls(root, capsys):
    os.mkdir(root / "step-00000011.tmp-abc")
    code, out, err = call(capsys, "ls", root)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["step", "saved", "bytes", "files", "tensors"]
    assert [(line[0], *line[3:]) for line in lines[1:3]] == [
        ("5", "2,400", "1", "1"),
        ("10", "2,400", "1", "1"),
    ]
    assert "step-00000011.tmp-abc: " in out
    os.remove(root / "step-00000005" / "manifest.json")
    code, out, _ = call(capsys, "ls", root)
    assert code == 66
    assert "corrupt: " in out
    assert "2,400" in out


def test_inspect(root, capsys):
    code, out, _ = call(capsys, "inspect", root)
    assert code == 0
    assert out.startswith("step 10, 2,400 bytes, ")
    assert torch.__version__ in out.splitlines()[0]
    assert "m.w     (20, 30)  float32  2,400" in out
    assert "objects: cursor" in out
    code, out, _ = call(capsys, "inspect", root, "--step", 5, "--json")
    with Store(root, read_only=True) as store:
        assert json.loads(out) == store.inspect(5)
    os.truncate(root / "step-00000010" / "manifest.json", 50)
    code, out, err = call(capsys, "inspect", root)
    assert (code, out) == (66, "")
    assert "step-00000010/manifest.json: " in err
    with rejects("", ..., "digest", CorruptCheckpoint, where="manifest.json"):
        run(["inspect", str(root)])


def test_verify(root, capsys):
    code, out, err = call(capsys, "verify", root)
    assert (code, err) == (0, "")
    assert [line.split(",")[0] for line in out.splitlines()] == ["step 5: sound", "step 10: sound"]
    damage(root, 10)
    code, out, _ = call(capsys, "verify", root)
    assert code == 66
    assert "step 5: sound" in out
    assert "step 10: corrupt: " in out
    assert "data-0.bin: block 0 (bytes 0-2400)" in out
    assert call(capsys, "verify", root, "--step", 5)[0] == 0
    code, out, _ = call(capsys, "verify", root, "--json")
    rows = json.loads(out)["checkpoints"]
    assert code == 66
    assert [(row["step"], row["bytes"], bool(row["error"])) for row in rows] == [
        (5, 2400, False),
        (10, 2400, True),
    ]
    assert sorted(os.listdir(root)) == ["lock", "step-00000005", "step-00000010"], "it only reads"


@pytest.mark.parametrize(
    ("arguments", "key", "value", "code"),
    [
        (["verify", "/none"], "directory", "/none", "not_found"),
        (["inspect", "ROOT", "--step", "7"], "step", 7, "not_found"),
        (["ls", "ABOVE"], "directory", "ABOVE", "empty"),
    ],
)
def test_rejected_arguments_are_78(root, capsys, arguments, key, value, code):
    places = {"ROOT": str(root), "ABOVE": str(root.parent)}
    arguments = [places.get(a, a) for a in arguments]
    assert call(capsys, *arguments)[0] == 78
    with rejects(key, places.get(value, value), code):
        run(arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls"], "DIR"),
        (["remove", "ROOT"], "remove"),
        (["inspect", "ROOT", "--step", "x"], "step"),
    ],
)
def test_wrong_usage_is_78(root, capsys, arguments, said):
    places = {"ROOT": str(root), "ABOVE": str(root.parent)}
    code, _, err = call(capsys, *(places.get(a, a) for a in arguments))
    assert code == 78
    assert "Traceback" not in err
    assert re.search(said, err), err


def test_help_is_0(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert all(word in out for word in ("ls", "inspect", "verify", "66"))


def test_a_bar_while_verifying_only_on_a_terminal(root, capsys, monkeypatch):
    from rich.console import Console

    monkeypatch.setattr(Console, "is_terminal", property(lambda self: True))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, out, err = call(capsys, "verify", root, "--step", 5)
    assert code == 0
    assert "2.4" in err
    assert "\x1b" not in out


@pytest.mark.slow
def test_as_a_module(root):
    command = [sys.executable, "-W", "ignore", "-m", "forge_ckpt", "verify", str(root)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    assert "step 10: sound" in run.stdout


def test_without_the_extra_one_line_names_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    code, out, err = call(capsys, "ls", ".")
    assert (code, out) == (78, "")
    assert "tyro" in err
    assert "'forge-ckpt[cli]'" in err


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify", "prune"])
def test_F178_a_folder_of_another_format_is_named_by_every_verb(tmp_path, verb):
    (tmp_path / ".metadata").touch()
    with rejects("path", str(tmp_path), "foreign", where=".metadata") as caught:
        run([verb, str(tmp_path)])
    assert "forge-ckpt convert" in caught.value.problems[0].fix


def test_F195_names_with_line_breaks_are_printed_as_text(tmp_path, capsys):
    roots = [tmp_path / "a", tmp_path / "b"]
    for size, root in enumerate(roots, 1):
        with Store(root) as store:
            store.save(1, {"m": {"x\n\x1b[31m": torch.ones(size)}})
    code, _, err = call(capsys, "average", *roots, "--out", tmp_path / "c")
    assert (code, err.count("\n"), "x\\n\\x1b" in err) == (78, 1, True), err
    damage(roots[0], 1)
    code, out, _ = call(capsys, "verify", roots[0])
    assert (code, out.count("\n"), "\x1b" in out) == (66, 1, False), out
    (roots[1] / "quarantine" / "step-1\n\x1b[31m").mkdir(parents=True)
    code, out, _ = call(capsys, "ls", roots[1])
    assert (code, out.count("\n"), "\x1b" in out) == (0, 3, False), out
    code, out, _ = call(capsys, "reshard", roots[1], tmp_path / "x\ny", "--ranks", 1)
    assert (code, out.count("\n")) == (0, 1), out

"""forge-train extract: the activations of a checkpoint, in a file that a kill does not change."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch

from forge_core.interp import ActivationStore
from forge_data import batch_of
from forge_lab import activation_files
from forge_lab import extract as module
from forge_lab._shared.problems import Problem
from forge_lab.cli import extract
from forge_lab.evaluate import evaluation_job
from forge_lab.extract import extract_run
from forge_testing.durability import synced_renames
from forge_testing.evaluations import asked
from forge_testing.problems import assert_problem, rejects
from forge_testing.runs import fit_alone, make_job
from forge_train import ConfigError, DataError, RunDirectory, StateError, load_model
from forge_train.toolkit import open_held_out

POINTS = ("layers.0.resid_*", "layers.0.attn_weights", "logits")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_job(tmp_path_factory.mktemp("extracted"))
    fit_alone(path, **asked(path.parent))
    return path.parent / "run"


def test_the_file_holds_what_the_model_computes(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.npz"
    assert extract_run(run, POINTS, out, rows=5, batch_size=2, set_name="seen", step=3) == (3, 5)
    model, _, _ = load_model(run, "cpu", 3)
    with numpy.load(out) as found:
        meta = json.loads(str(found["meta"]))
        assert (meta["step"], meta["rows"], meta["set"]) == (3, 5, "seen")
        tokens = torch.from_numpy(found["tokens"])
        assert tokens.shape[0] == 5
        with ActivationStore(POINTS).watch(model) as store, torch.no_grad():
            model(tokens, document_ids=torch.from_numpy(found["document_ids"]))
        assert set(found.files) == {*store.names, "tokens", "positions", "document_ids", "meta"}
        for name in store.names:
            torch.testing.assert_close(
                torch.from_numpy(found[name]), store[name], rtol=1e-5, atol=1e-6
            )
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]


@pytest.mark.parametrize("name", ["x.npz", "x"])
def test_F197_activations_are_on_the_disk_before_they_are_published(
    run: Path, tmp_path: Path, name: str
) -> None:
    with synced_renames() as moved:
        extract_run(run, ("logits",), tmp_path / name, rows=2)
    assert moved[-1] == name


def test_rows_are_those_of_the_set(run: Path, tmp_path: Path) -> None:
    extract_run(run, ("logits",), tmp_path / "x.npz", rows=3, set_name="seen")
    model, _, _ = load_model(run)
    job = evaluation_job(RunDirectory(run), None, 8)
    stream = open_held_out(job, model, job.parallel.axes(1))["eval.sets.seen"]
    wanted = batch_of(stream, range(3)).tokens.numpy()
    assert numpy.array_equal(numpy.load(tmp_path / "x.npz")["tokens"], wanted)


def test_killed_and_started_again_it_is_the_same_file(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, torn = tmp_path / "whole.npz", tmp_path / "torn.npz"
    extract_run(run, POINTS, whole, rows=7, batch_size=2)
    calls, compute = [], module._values

    class Killed(BaseException):
        pass

    def third(*args: object) -> dict[str, numpy.ndarray]:
        calls.append(args)
        if len(calls) == 3:
            raise Killed
        return compute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_values", third)
    with pytest.raises(Killed):
        extract_run(run, POINTS, torn, rows=7, batch_size=2)
    (tmp_path / "torn.npz.parts/rows-000000004.tmp").write_bytes(b"half")
    with rejects("rows", 7, "changed", StateError):
        extract_run(run, POINTS, torn, rows=6, batch_size=2)
    extract_run(run, POINTS, torn, rows=7, batch_size=2)
    assert len(calls) == 5, "two parts were there already"
    assert torn.read_bytes() == whole.read_bytes()


def killed_at(monkeypatch: pytest.MonkeyPatch, where: object, name: str, run: Path, out: Path, calls: int = 1) -> None:  # fmt: skip
    """Extract 6 rows of a point, and stop at the last of so many calls of `where.name`."""

    class Killed(BaseException):
        pass

    plain, left = getattr(where, name), [calls]

    def last(*args: object, **options: object) -> object:
        left[0] -= 1
        if not left[0]:
            raise Killed
        return plain(*args, **options)

    monkeypatch.setattr(where, name, last)
    with pytest.raises(Killed):
        extract_run(run, ("logits",), out, rows=6, batch_size=2)
    monkeypatch.setattr(where, name, plain)


@pytest.mark.lane("test")
def test_a_kill_after_the_last_step_leaves_no_partial_files(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.npz"
    killed_at(monkeypatch, activation_files.shutil, "rmtree", run, out)
    assert numpy.load(out)["logits"].shape[0] == 6
    with rejects("--output", str(out), "exists", ConfigError):
        extract_run(run, ("logits",), out, rows=6, batch_size=2)
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_partial_files_that_are_damaged_or_foreign_are_not_used(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, parts = tmp_path / "x.npz", tmp_path / "x.npz.parts"
    extract_run(run, ("logits",), tmp_path / "whole.npz", rows=6, batch_size=2)
    killed_at(monkeypatch, module, "_values", run, out, calls=3)
    first = parts / "rows-000000000.npz"
    whole = first.read_bytes()
    first.write_bytes(whole[:300])
    with rejects("", str(first), "damaged", StateError):
        extract_run(run, ("logits",), out, rows=6, batch_size=2)
    for request in (None, "{"):  # parts that nobody knows the command of
        parts.mkdir(exist_ok=True)
        numpy.savez(first, tokens=numpy.zeros((2, 32)), logits=numpy.zeros((2, 32, 257)))
        asked = parts / "request.json"
        asked.unlink(missing_ok=True) if request is None else asked.write_text(request)
        extract_run(run, ("logits",), out, rows=6, batch_size=2)
        assert out.read_bytes() == (tmp_path / "whole.npz").read_bytes()
        out.unlink()
    # a command that was refused holds nobody up
    values = module._values
    monkeypatch.setattr(module, "_values", _unreached)
    with rejects("points", "logits", "unreached", ConfigError):
        extract_run(run, ("logits",), out, rows=6, batch_size=2)
    monkeypatch.setattr(module, "_values", values)
    assert extract_run(run, ("final_norm",), out, rows=6, batch_size=2) == (6, 6)


def _unreached(*_: object) -> dict[str, numpy.ndarray]:
    raise ConfigError([Problem("points", "unreached", "logits", "must be found")])


def test_another_writer_and_a_full_disk_are_reported(run: Path, tmp_path: Path) -> None:
    out, most = tmp_path / "x.npz", resource.getrlimit(resource.RLIMIT_FSIZE)
    lock = tmp_path / "x.npz.parts/lock"
    lock.parent.mkdir()
    held = "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    command = [sys.executable, "-c", held, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        with rejects("", str(lock.parent), "locked", StateError):
            extract_run(run, ("logits",), out, rows=6, batch_size=2)
        other.communicate(b"\n")
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, most[1]))
    try:
        with pytest.raises(StateError, match="File too large") as full:
            extract_run(run, ("logits",), out, rows=6, batch_size=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        signal.signal(signal.SIGXFSZ, before)
    assert_problem(full.value, "", str(lock.parent), "write")
    assert extract_run(run, ("logits",), out, rows=6, batch_size=2) == (6, 6)


def test_values_that_fp16_cannot_hold_are_rejected(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(*args: object, **options: object) -> object:
        model, config, step = load_model(*args, **options)  # type: ignore[arg-type]
        with torch.no_grad():
            model.layers["0"].mixer.q_proj.weight *= 1e9  # type: ignore[operator, union-attr, index]
        return model, config, step

    monkeypatch.setattr(module, "load_model", large)
    points = ("layers.0.attn_scores",)
    with rejects("--dtype", "fp16", "range", DataError, where=points[0]):
        extract_run(run, points, tmp_path / "x.npz", rows=2, dtype="fp16")
    extract_run(run, points, tmp_path / "y.npz", rows=2)
    assert numpy.abs(numpy.load(tmp_path / "y.npz")[points[0]]).max() > 65504


@pytest.mark.lane("test")
def test_another_size_of_shards_after_a_kill_has_shards_of_its_own(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = tmp_path / "x.parts"
    killed_at(monkeypatch, activation_files.os, "replace", run, tmp_path / "x", calls=6)
    killed = {p.name for p in parts.glob("shards-*/*")}
    assert killed == {"rows-00001-of-00001.safetensors"}
    join, names = activation_files.Parts.join, [f"rows-0000{i}-of-00006.safetensors" for i in range(1, 7)]  # fmt: skip
    monkeypatch.setattr(activation_files.Parts, "join", lambda parts, _: join(parts, 1))
    extract_run(run, ("logits",), tmp_path / "x", rows=6, batch_size=2)
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == ["index.json", *names]


@pytest.mark.lane("test")
def test_the_command_lists_points_and_rejects_unknown_ones(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert extract([str(run)]) == 0
    assert "layers.0.head_out" in capsys.readouterr().out.split()
    out = tmp_path / "x.npz"
    arguments = [str(run), "--points", "layers.0.q", "--output", str(out), "--dtype", "fp16"]
    assert extract([*arguments, "--rows", "2", "--device", "cpu"]) == 0
    assert numpy.load(out)["layers.0.q"].dtype == numpy.float16
    assert "2 rows of validation" in capsys.readouterr().out
    binary = tmp_path / "x.bin"
    for more, key, value, code in (
        (dict(set_name="nothing"), "--set", "nothing", "unknown"),
        (dict(rows=0), "--rows", 0, "range"),
        (dict(dtype="int8"), "--dtype", "int8", "unknown"),
        (dict(output=binary), "--output", str(binary), "name"),
        (dict(shard_mib=0), "--shard_mib", 0, "range"),
        (dict(output=out), "--output", str(out), "exists"),
    ):
        given = {"run": run, "points": ("logits",), "output": tmp_path / "y.npz", **more}
        with rejects(key, value, code, ConfigError):
            extract_run(**given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"layers\.9\.q"):
        extract_run(run, ("layers.9.q",), tmp_path / "y.npz")
    with rejects("--output", ..., "missing", ConfigError):
        extract([str(run), "--points", "logits"])
    with rejects("parallel.dp_shard", -1, "divides", ConfigError):
        extract([str(run), "--points", "logits", "--output", str(tmp_path / "y.npz"), "--nproc", "3", "--parallel.tp", "2"])  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"], "what is refused leaves nothing"


@pytest.mark.slow
def test_a_process_is_killed_and_the_same_command_ends(run: Path, tmp_path: Path) -> None:
    whole, torn = tmp_path / "whole.npz", tmp_path / "torn.npz"
    extract_run(run, POINTS, whole, rows=40, batch_size=1)
    command = [sys.executable, "-m", "forge_train", "extract", str(run), "--points", *POINTS]
    command += ["--output", str(torn), "--rows", "40", "--batch_size", "1", "--device", "cpu"]
    process = subprocess.Popen(command)
    parts = tmp_path / "torn.npz.parts"
    while process.poll() is None and len(list(parts.glob("rows-*"))) < 3:
        time.sleep(0.001)  # polling a directory
    process.kill()
    process.wait()
    if not torn.exists():
        assert subprocess.run(command, check=True)
    assert torn.read_bytes() == whole.read_bytes()


PEAKS = """
import sys
from pathlib import Path
from forge_lab.extract import extract_run
run, folder = map(Path, sys.argv[1:])
for rows in (500, 10_000):
    for name in (f"{rows}.npz", f"{rows}"):
        points = ("*.resid_*",)
        extract_run(run, points, folder / name, rows, 100, "seen", shard_mib=8, device="cpu")
    status = Path("/proc/self/status").read_text()
    print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_ten_thousand_rows_take_the_memory_of_a_few(run: Path, tmp_path: Path) -> None:
    """As one file and as a folder: the peak of the process grows by a fraction of the files that it writes."""
    command = [sys.executable, "-c", PEAKS, str(run), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    few, many = (int(kib) * 1024 for kib in done.stdout.split())
    with numpy.load(tmp_path / "10000.npz") as found:
        assert len(found["tokens"]) == 10_000
    size = (tmp_path / "10000.npz").stat().st_size
    assert size > 50 * 2**20
    assert many - few < size / 4, (few, many, size)

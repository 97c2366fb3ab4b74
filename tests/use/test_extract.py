"""forge-train extract: the activations of a checkpoint, in a file that a kill does not change."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
from tests.use.test_evaluation_sets import asked

from forge_core.interp import ActivationStore
from forge_data import batch_of
from forge_testing.runs import fit_alone, make_job
from forge_train import ConfigError, StateError
from forge_train.cli import extract
from forge_train.jobs import load_model
from forge_train.report import extract as module
from forge_train.report.evaluate import evaluation_job
from forge_train.report.extract import extract_run
from forge_train.trainer.build import open_held_out
from forge_train.trainer.run_directory import RunDirectory

POINTS = ("layers.0.resid_*", "layers.0.attn_weights", "logits")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_job(tmp_path_factory.mktemp("extracted"))
    fit_alone(path, **asked(path.parent))
    return path.parent / "run"


def test_the_file_holds_what_the_model_computes(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.npz"
    assert extract_run(run, POINTS, out, rows=5, batch=2, set_name="seen", step=3) == (3, 5)
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
    extract_run(run, POINTS, whole, rows=7, batch=2)
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
        extract_run(run, POINTS, torn, rows=7, batch=2)
    (tmp_path / "torn.npz.parts/rows-000000004.tmp").write_bytes(b"half")
    with pytest.raises(StateError, match=r"another command \(rows 7, now 6\)"):
        extract_run(run, POINTS, torn, rows=6, batch=2)
    extract_run(run, POINTS, torn, rows=7, batch=2)
    assert len(calls) == 5, "two parts were there already"
    assert torn.read_bytes() == whole.read_bytes()


def test_the_command_lists_points_and_refuses(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert extract([str(run)]) == 0
    assert "layers.0.head_out" in capsys.readouterr().out.split()
    out = tmp_path / "x.npz"
    arguments = [str(run), "--points", "layers.0.q", "--output", str(out), "--dtype", "fp16"]
    assert extract([*arguments, "--rows", "2", "--device", "cpu"]) == 0
    assert numpy.load(out)["layers.0.q"].dtype == numpy.float16
    assert "2 rows of validation" in capsys.readouterr().out
    for more, words in (
        (dict(points=("layers.9.q",)), "layers.9.q"),
        (dict(set_name="nothing"), "--set nothing must be a set that .*: validation, seen"),
        (dict(rows=0), "--rows 0 must be 1 or more"),
        (dict(dtype="int8"), "--dtype int8 must be one of fp32, fp16"),
        (dict(output=tmp_path / "x.bin"), r"x.bin must end in .npz, or be the name of a folder"),
        (dict(shard_mib=0), "--shard_mib 0 must be 1 or more"),
        (dict(output=out), "exists already"),
    ):
        given = {"run": run, "points": ("logits",), "output": tmp_path / "y.npz", **more}
        with pytest.raises(ConfigError, match=words):
            extract_run(**given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--output must be given to write activations"):
        extract([str(run), "--points", "logits"])
    with pytest.raises(ConfigError, match=r"parallel: .*tp 2"):
        extract([str(run), "--points", "logits", "--output", str(tmp_path / "y.npz"), "--nproc", "3", "--parallel.tp", "2"])  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"], "what is refused leaves nothing"


@pytest.mark.slow
def test_a_process_is_killed_and_the_same_command_ends(run: Path, tmp_path: Path) -> None:
    whole, torn = tmp_path / "whole.npz", tmp_path / "torn.npz"
    extract_run(run, POINTS, whole, rows=40, batch=1)
    command = [sys.executable, "-m", "forge_train", "extract", str(run), "--points", *POINTS]
    command += ["--output", str(torn), "--rows", "40", "--batch", "1", "--device", "cpu"]
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
from forge_train.report.extract import extract_run
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
    assert many - few < size / 8, (few, many, size)

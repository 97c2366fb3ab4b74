"""forge-ckpt cat, diff, average, prune, reshard, convert: content, streams, exit codes, refusals."""

import errno
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from disk_calls import record_calls
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import forge_ckpt.write.blocks
from forge_ckpt import (
    CorruptCheckpoint,
    ForgeSavePlanner,
    ForgeWriter,
    Keep,
    StepExists,
    Store,
    cli,
    read_tensors,
)
from forge_ckpt._shared.problems import Shown
from forge_ckpt.read.memory import equal_bits
from forge_ckpt.read.tensors import SavedTensors
from forge_ckpt.verbs import compare
from forge_testing import run_on_ranks
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

pytest.importorskip("tyro", reason="of the extra [cli]")
pytest.importorskip("rich", reason="of the extra [cli]")


def run(*arguments):
    """Raises what ``cli.main`` prints."""
    from forge_ckpt import cli

    return cli.run([str(argument) for argument in arguments])


def call(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def call_json(capsys, *arguments, code=0):
    found, out, err = call(capsys, *arguments, "--json")
    assert (found, err) == (code, "")
    return json.loads(out)


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "w": torch.randn(5, 7, generator=generator),
            "t": torch.randn(6, 4, generator=generator).t().contiguous(),
            "bf": torch.randn(33, generator=generator).bfloat16(),
            "f8": torch.randn(8, generator=generator).to(torch.float8_e4m3fn),
            "c": torch.randn(3, dtype=torch.complex64, generator=generator),
            "steps": torch.tensor(seed),
            "ids": torch.tensor([2**60 + seed, 1]),
            "empty": torch.zeros(0, 3),
            "flag": torch.tensor([True, False]),
        },
        "cursor": {"at": seed, "of": [1, {"x": 0.5}]},
    }


def saved(path, seed, step=None, **changes):
    state = values(seed)
    state["model"].update(changes)
    with Store(path, keep_last=100) as store:
        store.save(seed if step is None else step, state)
    return path


# ---- cat


def test_cat_prints_what_was_saved(tmp_path, capsys):
    root, wanted = saved(tmp_path, 1), values(1)["model"]
    saved(tmp_path, 2)
    code, out, err = call(capsys, "cat", root, "model.w", "--step", 1)
    assert (code, err) == (0, "")
    assert out == f"model.w (5, 7) float32\n{wanted['w']}\n"
    for text, part in [
        ("0:2,:", wanted["w"][0:2]),
        ("1:4,2:3", wanted["w"][1:4, 2:3]),
        ("-1,:", wanted["w"][-1]),
        (":,3", wanted["w"][:, 3]),
        ("2,2", wanted["w"][2, 2]),
    ]:
        found = call_json(capsys, "cat", root, "model.w", "--step", 1, f"--slice={text}")
        assert found["shape"] == list(part.shape), text
        assert torch.equal(torch.tensor(found["values"]), part), text
    for name in ("bf", "f8", "steps", "flag", "empty"):
        found = call_json(capsys, "cat", root, f"model.{name}", "--step", 1)
        assert found["values"] == wanted[name].to(torch.float32).tolist()
    assert call_json(capsys, "cat", root, "cursor")["value"] == {"at": 2, "of": [1, {"x": 0.5}]}


@pytest.mark.parametrize(
    ("arguments", "key", "value", "code"),
    [
        (["model.x"], "name", "model.x", "not_found"),
        (["model.w", "--slice=0:2"], "slice", "0:2", "dims"),
        (["model.w", "--slice=0:2,x"], "slice", "0:2,x", "position"),
        (["model.w", "--slice=0:4:2,:"], "slice", "0:4:2,:", "position"),
        (["model.w", "--slice=9,:"], "slice", "9,:", "empty"),
        (["model.w", "--step", "3"], "step", 3, "not_found"),
    ],
)
def test_cat_rejects_wrong_arguments(tmp_path, capsys, arguments, key, value, code):
    arguments = ["cat", saved(tmp_path, 1), *arguments]
    assert call(capsys, *arguments)[0] == 78
    with rejects(key, value, code):
        run(*arguments)


def test_cat_offers_the_names_that_are_near(tmp_path):
    with rejects("name", "model.stepz", "not_found", where="model.steps"):
        run("cat", saved(tmp_path, 1), "model.stepz")


def test_cat_reads_only_the_blocks_of_its_part(tmp_path, capsys):
    with Store(tmp_path) as store:
        store.save(1, {"w": torch.arange(4 * 2**20, dtype=torch.float32).view(4, -1)})
    with open(tmp_path / "step-00000001" / "data-0.bin", "r+b") as file:
        file.write(b"\xff")
    found = call_json(capsys, "cat", tmp_path, "w", "--slice=3,0:2")
    assert found["values"] == [3.0 * 2**20, 3.0 * 2**20 + 1]
    code, _, err = call(capsys, "cat", tmp_path, "w", "--slice=0,0:2")
    assert code == 66
    assert "block 0" in err


# ---- diff


def test_diff_of_equal_checkpoints_is_0(tmp_path, capsys):
    a, b = saved(tmp_path / "a", 1), saved(tmp_path / "b", 1, step=9)
    code, out, err = call(capsys, "diff", a, b / "step-00000009")
    assert (code, err) == (0, "")
    assert [int(n) for n in re.findall(r"\d+", out)] == [9, 0], "equal, and different"


def test_diff_names_every_kind_of_difference(tmp_path, capsys):
    a = saved(tmp_path / "a", 1, nan=torch.tensor([float("nan"), 1.0]), extra=torch.ones(1))
    changed = values(1)["model"]
    changed["w"][2, 3] += 0.5
    wrong = {
        "w": changed["w"],
        "t": changed["t"].double(),
        "bf": changed["bf"][:-1],
        "ids": changed["ids"] + 1,
        "nan": torch.tensor([float("nan"), float("nan")]),
        "c": changed["c"] * 2,
        "f8": (-changed["f8"].float()).to(torch.float8_e4m3fn),
        "more": torch.ones(1),
    }
    b = saved(tmp_path / "b", 1, step=2, **wrong)
    with Store(tmp_path / "c") as store:
        state = values(1)
        state["cursor"]["of"][1]["x"] = 0.25
        store.save(2, state)
    found = call_json(capsys, "diff", a, b, code=1)
    assert (found["only_in_a"], found["only_in_b"]) == (["model.extra"], ["model.more"])
    rows = {row["name"].removeprefix("model."): row for row in found["tensors"]}
    assert rows.keys() == {"w", "t", "bf", "ids", "nan", "c", "f8"}
    old = values(1)["model"]
    assert (rows["w"]["elements"], rows["w"]["max_abs"]) == (1, 0.5)
    assert rows["w"]["max_rel"] == pytest.approx(0.5 / changed["w"][2, 3].abs().item(), rel=1e-6)
    assert rows["t"]["dtypes"] == ["float32", "float64"]
    assert (rows["t"]["elements"], rows["t"]["max_abs"]) == (0, 0.0)
    assert (rows["bf"]["shapes"], rows["bf"]["max_abs"]) == ([[33], [32]], None)
    assert rows["ids"]["elements"] == 2, "float64 alone would not see it"
    assert (rows["nan"]["elements"], rows["nan"]["max_abs"]) == (1, "nan")
    assert rows["c"]["max_abs"] == pytest.approx(old["c"].abs().max().item(), rel=1e-6)
    assert rows["f8"]["max_abs"] == 2 * old["f8"].float().abs().max().item()
    code, out, _ = call(capsys, "diff", a, b)
    assert code == 1
    assert re.search(r"model\.w +\(5, 7\) +float32 +1 +0\.5 ", out)
    assert re.search(r"model\.bf +\(33,\) / \(32,\) +bfloat16\n", out)
    found = call_json(capsys, "diff", a, tmp_path / "c", code=1)
    assert found["objects"] == {"cursor.of.1.x": [0.5, 0.25]}


# ---- average


def test_average_is_the_mean_in_float64(tmp_path, capsys):
    roots = [saved(tmp_path / str(seed), seed) for seed in (1, 2, 3)]
    for weights, shares in ((), (1 / 3, 1 / 3, 1 / 3)), ((1, 2, 5), (1 / 8, 2 / 8, 5 / 8)):
        out = tmp_path / f"out{len(weights)}"
        more = ["--weights", *weights] if weights else []
        written = call_json(capsys, "average", *roots, "--out", out, *more)["written"]
        assert written == str(out / "step-00000003")
        found = dict(read_tensors(out))
        states = [values(seed)["model"] for seed in (1, 2, 3)]
        for name in ("w", "t", "bf", "f8", "c"):
            dtype = states[0][name].dtype
            wide = torch.complex128 if dtype.is_complex else torch.float64
            mean = sum(s[name].to(wide) * share for s, share in zip(states, shares))
            assert equal_bits(found[f"model.{name}"], mean.to(dtype)), name
        for name in ("steps", "ids", "flag"):
            assert torch.equal(found[f"model.{name}"], states[2][name]), "the last one's"
        state = {"cursor": {}}
        with Store(out) as store:
            assert store.load(state) == 3
        assert state["cursor"]["at"] == 3


def test_average_rejects_wrong_arguments(tmp_path, capsys):
    a, b = saved(tmp_path / "a", 1), saved(tmp_path / "b", 2, w=torch.ones(2))
    out = ["--out", tmp_path / "o"]
    here = Shown("(5, 7) torch.float32")
    for arguments, key, value, code, kind in [
        ([a, *out], "checkpoints", 1, "length", ValueError),
        ([a, b, *out], "model.w", here, "mismatch", ValueError),
        ([a, a, *out, "--weights", "1"], "weights", [1.0], "sum", ValueError),
        ([a, a, *out, "--weights", "1", "-1"], "weights", [1.0, -1.0], "sum", ValueError),
        ([a, a, "--out", a], "step", 1, "order", StepExists),
    ]:
        assert call(capsys, "average", *arguments)[0] == 78
        with rejects(key, value, code, kind):
            run("average", *arguments)
    assert not list(tmp_path.glob("o/step-*"))


# ---- reshard


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_reshard_keeps_the_content(tmp_path, capsys, ranks):
    root, out = saved(tmp_path / "a", 4), tmp_path / "out"
    call_json(capsys, "reshard", root, out, "--ranks", ranks)
    step = out / "step-00000004"
    assert sorted(os.listdir(step)) == [*(f"data-{r}.bin" for r in range(ranks)), "manifest.json"]
    assert call(capsys, "diff", root, out)[0] == 0
    assert call(capsys, "verify", out)[0] == 0
    with SavedTensors(out) as found:
        chunks = found.table.tensors["model.w"].chunks
        assert [c.sizes[0] for c in chunks] == [len(p) for p in torch.arange(5).chunk(ranks)]
    back = tmp_path / "back"
    call_json(capsys, "reshard", out, back, "--ranks", 1)
    with SavedTensors(root) as a, SavedTensors(back) as b:
        assert a.table.content() == b.table.content()


def save_sharded(root):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(42.0).view(6, 7)
    state = {f"d{dim}": distribute_tensor(whole, mesh, [Shard(dim)]) for dim in (0, 1)}
    with Store(root) as store:
        store.save(1, state)


@pytest.mark.lane("quick")
@pytest.mark.distributed
def test_reshard_of_columns(tmp_path, capsys):
    run_on_ranks(3, save_sharded, str(tmp_path / "a"))
    call_json(capsys, "reshard", tmp_path / "a", tmp_path / "b", "--ranks", 4)
    for name, tensor in read_tensors(tmp_path / "b"):
        assert torch.equal(tensor, torch.arange(42.0).view(6, 7)), name


def test_reshard_rejects_wrong_arguments(tmp_path, capsys):
    arguments = ["reshard", saved(tmp_path / "a", 4), tmp_path / "o", "--ranks", 0]
    assert call(capsys, *arguments)[0] == 78
    with rejects("ranks", 0, "range"):
        run(*arguments)
    with open(tmp_path / "a" / "step-00000004" / "data-0.bin", "r+b") as file:
        file.write(b"\xff")
    code, _, err = call(capsys, "reshard", tmp_path / "a", tmp_path / "o", "--ranks", 2)
    assert (code, "block 0" in err) == (66, True)
    assert os.listdir(tmp_path / "o") == ["lock"], "nothing unfinished is left"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_without_a_step_goes_into_no_store(tmp_path):
    writer = ForgeWriter(tmp_path / "a")
    dcp.save({"x": torch.ones(1)}, storage_writer=writer, planner=ForgeSavePlanner())
    with rejects("step", ..., "missing"):
        run("reshard", tmp_path / "a", tmp_path / "o", "--ranks", 1)


def test_a_step_is_on_the_disk_before_its_name(tmp_path, capsys, monkeypatch):
    root, out = saved(tmp_path / "a", 4), tmp_path / "out"
    calls = record_calls(monkeypatch)
    call_json(capsys, "reshard", root, out, "--ranks", 2)
    (temporary,) = [path for call, path in calls if call == "rename"]
    assert calls == [
        ("fsync", str(tmp_path)),
        ("fsync", f"{temporary}/data-0.bin"),
        ("fsync", f"{temporary}/data-1.bin"),
        ("fsync", f"{temporary}/manifest.json"),
        ("fsync", temporary),
        ("rename", temporary),
        ("fsync", str(out)),
    ]


@pytest.mark.parametrize("place", ["write_at", "fsync", "rename"])
def test_a_disk_that_fails_leaves_no_step(tmp_path, capsys, monkeypatch, place):
    root, out = saved(tmp_path / "a", 4), tmp_path / "out"

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner = forge_ckpt.write.blocks if place == "write_at" else os
    monkeypatch.setattr(owner, place, fail)
    code, _, err = call(capsys, "reshard", root, out, "--ranks", 2)
    assert (code, err) == (78, "forge-ckpt: [Errno 28] No space left on device\n")
    monkeypatch.undo()
    assert os.listdir(out) == ([] if place == "fsync" else ["lock"])
    assert call(capsys, "verify", root)[0] == 0


# ---- prune


@pytest.fixture
def history(tmp_path):
    with Store(tmp_path, keep=Keep(last=100)) as store:
        for step in range(12):
            metrics = {"loss": abs(step - 5.5)} if step % 2 else {}
            store.save(step, {"w": torch.full((3,), float(step))}, metrics=metrics)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["--last", 2], [10, 11]),
        (["--last", 1, "--every", 5], [0, 5, 10, 11]),
        (["--last", 1, "--best", "loss"], [5, 11]),
        (["--last", 1, "--best", "loss", "--mode", "max"], [11]),
        (["--last", 1, "--milestones", "powers_of_2"], [0, 1, 2, 4, 8, 11]),
        (["--last", 100], list(range(12))),
    ],
)
def test_prune(history, capsys, arguments, kept):
    plan = call_json(capsys, "prune", history, *arguments, "--dry-run")
    removed = [step for step in range(12) if step not in kept]
    assert plan == {"kept": kept, "removed": removed, "dry_run": True}
    with Store(history, read_only=True) as store:
        assert store.steps() == list(range(12))
    assert call_json(capsys, "prune", history, *arguments) == {**plan, "dry_run": False}
    with Store(history, read_only=True) as store:
        assert store.steps() == kept
    assert not [name for name in os.listdir(history) if ".tmp-" in name]


def test_prune_removes_nothing_when_the_newest_is_damaged(history, capsys):
    with open(history / "step-00000011" / "data-0.bin", "r+b") as file:
        file.write(b"\xff")
    assert call(capsys, "prune", history, "--last", 1)[0] == 66
    with rejects("block", 0, "digest", CorruptCheckpoint) as caught:
        run("prune", history, "--last", 1)
    assert_problem(caught.value, "", ..., "newest")
    with Store(history, read_only=True) as store:
        assert len(store.steps()) == 12


@pytest.mark.slow
def test_prune_rejects_wrong_arguments(history, tmp_path, capsys):
    script = f"""
        import sys
        from forge_ckpt import Store
        store = Store({str(history)!r})
        print("open", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as writer:
        assert writer.stdout.readline() == "open\n"
        code, _, err = call(capsys, "prune", history, "--last", 1)
        writer.communicate("")
    assert (code, f" pid {writer.pid} " in err) == (78, True)
    none = history / "none"
    for arguments, key, value, code in [
        ([history, "--last", 0], "last", 0, "range"),
        ([none], "directory", str(none), "not_found"),
    ]:
        assert call(capsys, "prune", *arguments)[0] == 78
        with rejects(key, value, code):
            run("prune", *arguments)
    (tmp_path / "bad/quarantine/step-00000003-0").mkdir(parents=True)
    with rejects("directory", str(tmp_path / "bad"), "empty", where="step-00000003-0"):
        run("prune", tmp_path / "bad")
    with Store(history, read_only=True) as store:
        assert len(store.steps()) == 12


# ---- convert


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_convert_both_ways(tmp_path, capsys):
    state = {"model": values(1)["model"], "loader": {"position": 3, "object": {1, 2}}}
    dcp.save(state, checkpoint_id=tmp_path / "step_7", no_dist=True)
    code, _, err = call(capsys, "convert", tmp_path / "step_7", tmp_path / "o")
    assert (code, "--without 'loader.object'" in err) == (78, True)
    done = call_json(
        capsys, "convert", tmp_path / "step_7", tmp_path / "o", "--without", "*.object", "x.*"
    )
    assert done["written"] == str(tmp_path / "o" / "step-00000007")
    assert "not_read" not in done
    call_json(capsys, "convert", tmp_path / "o", tmp_path / "dcp", "--to", "dcp")
    (tmp_path / "dcp" / "train_state.pt").write_bytes(b"x")
    done = call_json(capsys, "convert", tmp_path / "dcp", tmp_path / "p", "--step", 8)
    assert done["not_read"] == ["train_state.pt"]
    code, out, _ = call(capsys, "diff", tmp_path / "o", tmp_path / "p")
    assert (code, re.findall(r"\d+", out)) == (0, ["9", "0"]), "equal, and different"
    arguments = ["convert", tmp_path / "o", tmp_path / "q", "--to", "dcp", "--step", 3]
    assert call(capsys, *arguments)[0] == 78
    with rejects("to", "dcp", "excludes"):
        run(*arguments)
    code, _, err = call(capsys, "ls", tmp_path / "dcp")
    assert code == 78


def test_bars_only_on_a_terminal(tmp_path, capsys, monkeypatch):
    from rich.console import Console

    monkeypatch.setattr(Console, "is_terminal", property(lambda self: True))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    root = saved(tmp_path / "a", 1)
    for number, arguments in enumerate(
        [["reshard", root, tmp_path / "b", "--ranks", 2], ["diff", root, root]]
    ):
        code, out, err = call(capsys, *arguments)
        assert code == 0
        assert ["write", "compare"][number] in err
        assert "write" not in out.replace("written", "")


@pytest.mark.slow
def test_memory_is_a_tensor_and_not_the_state(tmp_path):
    """128 tensors of 2 MiB in each of two checkpoints, by a process that does nothing else."""
    for name in ("a", "b"):
        with Store(tmp_path / name) as store:
            store.save(1, {f"w{i}": torch.full((2**19,), float(i)) for i in range(128)})
    script = r"""
        import re
        from pathlib import Path
        from forge_ckpt import cli
        from forge_ckpt.verbs import compare, rewrite
        def kilobytes(name):
            return int(re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())[1])
        before = kilobytes("VmRSS")
        for call in ("diff a b", "reshard a c --ranks 3", "average a b --out d"):
            assert cli.main(call.split()) == 0
        print((kilobytes("VmHWM") - before) / 1024)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    mib = float(done.stdout.split()[-1])
    assert mib < 140, "blocks, some tensors in float64 and code: 55 to 85; a state has 256"


@pytest.mark.parametrize("slab", [1 << 20, 3])
def test_F197_elements_that_differ_are_counted_in_all_slabs(monkeypatch, slab):
    monkeypatch.setattr(compare, "_ELEMENTS_AT_ONCE", slab)
    a = torch.arange(10, dtype=torch.float32)
    b = a.clone()
    b[[0, 4, 5]] += torch.tensor([0.25, 2.0, -0.5])
    assert compare._distance(a, b) == (3, 2.0, 1.0)
    assert compare._distance(a, b.double()) == (3, 2.0, 1.0)


def test_F149_a_tilde_is_expanded_in_stores_and_arguments(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    with Store("~/a[1]") as store:
        store.save(1, {"w": torch.ones(2)})
    assert store.path == tmp_path / "a[1]"
    assert cli.main(["ls", "~/a[1]"]) == 0
    assert "1" in capsys.readouterr().out
    assert cli.main(["reshard", "~/a[1]", "~/b", "--ranks=1"]) == 0
    assert SavedTensors("~/b").read("w").tolist() == [1, 1]

"""Runs with [lora]: the frozen weights are saved once, checkpoints hold adapters, and both leave as one model."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ckpt import read_tensors
from forge_core.lora import adapter_names
from forge_parallel import end_process_group
from forge_testing import forge_train, kill_after_step, models, runs, start, write_job
from forge_testing.problems import ANY, rejects
from forge_train import Callback, ConfigError, StateError, Trainer, load_job, load_trained, read_run
from forge_train.hf.exporting import export_run

pytestmark = pytest.mark.lane("test")

ALL = ["weights", "optimizer", "cursor"]
QUIET = {"metrics.console": "off", "sample.max_new_tokens": 0, "schedule.name": "constant"}
LORA = {"lora__rank": 3, "lora__alpha": 6.0}
EIGHT = {"train__steps": 8, "checkpoint__keep_last": 9}


def job_of(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = write_job(folder)
    path.write_text(path.read_text().replace("num_layers = 1", "num_layers = 2"))
    return path


def fit(folder: Path, *callbacks: Callback, **overrides: Any) -> Trainer:
    flat = {key.replace("__", "."): value for key, value in overrides.items()}
    trainer = Trainer(load_job(job_of(folder), {**QUIET, **flat}), list(callbacks))
    trainer.fit()
    return trainer


@pytest.fixture(autouse=True)
def _without_group() -> Iterator[None]:
    """Weights in 16 bits are wrapped on one rank, too, which begins a process group."""
    yield
    end_process_group()


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all weights."""
    folder = tmp_path_factory.mktemp("trunk")
    fit(folder, train__steps=6)
    return folder / "run"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, trunk: Path) -> Path:
    """Adapters of eight steps beside it."""
    folder = tmp_path_factory.mktemp("tuned")
    fit(folder, init__from=str(trunk), **LORA, **EIGHT)
    return folder / "run"


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_frozen_weights_are_saved_once_in_16_bits_and_checkpoints_hold_the_rest(
    trunk: Path, tuned: Path
) -> None:
    base, before = dict(read_tensors(tuned / "base")), runs.saved_tensors(trunk)
    frozen = {name for name in before if name.startswith("model.")}
    assert base.keys() == frozen
    for name, value in base.items():
        assert torch.equal(value, before[name].to(torch.bfloat16)), name
    for step in (3, 6, 8):
        saved = runs.saved_tensors(tuned, step)
        model = {name for name in saved if name.startswith("model.")}
        assert len(model) == 2 * 2 * 4, "two matrices for four projections of two layers"
        assert {name.rpartition(".")[2] for name in model} == {"lora_a", "lora_b"}
        assert not [n for n in saved if n.startswith("optimizer.") and "lora" not in n]
    assert runs.saved_tensors(tuned, 3)["model.layers.0.mixer.q_proj.lora_b"].abs().max() > 0
    losses = read_run(tuned).metrics["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_killed_it_goes_on_with_the_same_bits_also_when_the_parent_is_gone(
    tmp_path: Path, trunk: Path, tuned: Path
) -> None:
    parent, job = shutil.copytree(trunk, tmp_path / "parent"), job_of(tmp_path)
    flags = ["--init.from", str(parent), "--lora.rank", "3", "--lora.alpha", "6.0"]
    flags += ["--train.steps", "8", "--schedule.name", "constant", "--checkpoint.wait", "true"]
    flags += ["--checkpoint.keep_last", "9"]
    kill_after_step(start("run", job, *flags), tmp_path / "run/metrics.jsonl", 5)
    shutil.rmtree(parent)
    written = {f: f.stat().st_mtime_ns for f in (tmp_path / "run/base").rglob("*") if f.is_file()}
    done = forge_train("run", job, *flags)
    assert done.code == 0, done.err
    runs.assert_same_bits(runs.saved_tensors(tmp_path / "run"), runs.saved_tensors(tuned))
    assert all(f.stat().st_mtime_ns == at for f, at in written.items()), "written once"


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_files_of_an_attempt_without_a_checkpoint_are_written_again(
    tmp_path: Path, trunk: Path, tuned: Path
) -> None:
    for seed in (0, 1):  # of fresh weights; the second finds one step, and its number is taken
        with pytest.raises(runs.Died):
            fit(tmp_path, runs.Dies(), run__seed=seed, **LORA, **EIGHT)
    other = dict(read_tensors(tmp_path / "run/base"))
    fit(tmp_path, init__from=str(trunk), **LORA, **EIGHT)
    base = dict(read_tensors(tmp_path / "run/base"))
    assert not torch.equal(base["model.embedding.weight"], other["model.embedding.weight"])
    runs.assert_same_bits(runs.saved_tensors(tmp_path / "run"), runs.saved_tensors(tuned))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [{}, {"parallel__tp": 2}, {"parallel__pp": 2}],
    ids=["fsdp", "tp", "pp"],
)
def test_saved_in_one_layout_it_goes_on_in_another(
    tmp_path: Path, trunk: Path, layout: dict[str, int]
) -> None:
    common = {
        **{key.replace(".", "__"): value for key, value in QUIET.items()},
        "init__from": str(trunk),
        "optimizer__eps": 1e-4,
        "lora__base_dtype": "fp32",
        **LORA,
    }
    job = job_of(tmp_path)
    runs.together(runs.fit_on_ranks(2, job, train__steps=4, **{**common, **layout}))
    mixed = runs.fit_on_ranks(1, job, train__steps=8, **common)
    alone = {key.replace("__", "."): value for key, value in common.items()}
    whole = runs.fit_reference(job_of(tmp_path / "whole"), **{**alone, "train.steps": 8})
    adapters = [
        {n: v for n, v in runs.together(f).items() if "lora" in n} for f in (mixed, [whole])
    ]
    assert len(adapters[0]) == 3 * 2 * 2 * 4, "matrices and two moments each"
    for name, value in adapters[1].items():
        assert (adapters[0][name] - value).abs().max() <= 1e-4 * value.abs().max(), name


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stage_without_an_adapter_is_saved_and_resumed(tmp_path: Path, trunk: Path) -> None:
    common = {
        **{key.replace(".", "__"): value for key, value in QUIET.items()},
        "init__from": str(trunk),
        **LORA,
        "lora__patterns": ["layers.1.*.q_proj"],
        "lora__base_dtype": "fp32",
        "optimizer__eps": 1e-4,
    }
    job = job_of(tmp_path)
    runs.together(runs.fit_on_ranks(2, job, train__steps=2, parallel__pp=2, **common))
    assert load_trained(tmp_path / "run")[2] == 2
    mixed = runs.together(runs.fit_on_ranks(2, job, train__steps=4, parallel__pp=2, **common))
    whole = runs.together(
        runs.fit_on_ranks(1, job_of(tmp_path / "whole"), train__steps=4, **common)
    )
    names = [name for name in whole if "lora" in name]
    assert len(names) == 2 * 3
    for name in names:
        assert (mixed[name] - whole[name]).abs().max() <= 1e-4 * whole[name].abs().max(), name


@pytest.mark.lane("quick")
def test_the_trained_model_has_its_adapters_added(tmp_path: Path, tuned: Path) -> None:
    seen = Logits()
    fit(
        tmp_path,
        seen,
        init__from=str(tuned),
        init__keep=ALL,
        **{**LORA, **EIGHT, "train__steps": 9},
    )
    model, _, step = load_trained(tuned)
    assert step == 8
    assert not adapter_names(model)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert torch.allclose(model(seen.tokens), seen.logits, atol=1e-5)


class Logits(Callback):
    """Of the model as training has it, before its first step."""

    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))

    def on_start(self, trainer: Trainer) -> None:
        with torch.no_grad():
            self.logits = trainer.model(self.tokens)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_fork_keeps_base_adapters_and_moments(tmp_path: Path, tuned: Path) -> None:
    init = {"init__from": f"{tuned}@3", "init__keep": ALL}
    fit(tmp_path, **init, **LORA, **EIGHT)
    runs.assert_same_bits(runs.saved_tensors(tmp_path / "run"), runs.saved_tensors(tuned))
    runs.assert_same_bits(
        dict(read_tensors(tmp_path / "run/base")), dict(read_tensors(tuned / "base"))
    )
    fit(tmp_path / "warm", init__from=str(tuned), **LORA, train__steps=1, optimizer__lr=1e-12)
    warm = runs.saved_tensors(tmp_path / "warm/run")
    for name, value in runs.saved_tensors(tuned).items():
        if name.startswith("model."):
            assert torch.allclose(warm[name], value, atol=1e-9), name


def test_exports_are_the_merged_model_and_a_folder_of_peft(
    tmp_path: Path, trunk: Path, tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    export_run(tuned, tmp_path / "merged", check=True)
    assert "check: largest difference" in capsys.readouterr().out
    export_run(trunk, tmp_path / "base", dtype="bf16")
    export_run(tuned, tmp_path / "adapter", adapter=True)
    assert sorted(f.name for f in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "forge.json",
    ]
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        merged = load(tmp_path / "merged")(Logits.tokens).logits
        base = load(tmp_path / "base", dtype=torch.float32)
        plain = base(Logits.tokens).logits
        both = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(Logits.tokens).logits
    assert torch.allclose(both, merged, atol=1e-5)
    assert (plain - merged).abs().max() > 100 * (both - merged).abs().max()


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_base_that_is_gone_or_another_one_is_rejected(tmp_path: Path, tuned: Path) -> None:
    run = shutil.copytree(tuned, tmp_path / "run")
    more = {**LORA, "train__steps": 9}
    aside = run.rename(tmp_path / "aside")
    fit(tmp_path, **LORA, **EIGHT)  # another base
    other = (tmp_path / "run").rename(tmp_path / "other")
    aside.rename(run)
    shutil.rmtree(run / "base")
    config = {**more, "init__from": _given(tuned)}
    with rejects("base", ANY, "missing", StateError):
        fit(tmp_path, **config)
    shutil.copytree(other / "base", run / "base")
    with rejects("digest", ANY, "mismatch", StateError):
        fit(tmp_path, **config)
    with rejects("digest", ANY, "mismatch", StateError):
        load_trained(run)
    with rejects("", ANY, "digest", ConfigError):
        fit(tmp_path / "fork", init__from=str(run), **LORA)
    with rejects("", str(run / "base"), "base", ConfigError):
        export_run(run, tmp_path / "out")
    shutil.rmtree(run / "base")
    shutil.copytree(tuned / "base", run / "base")
    data = next(run.glob("base/step-*/data-0.bin"))
    flipped = bytearray(data.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    data.write_bytes(flipped)
    with pytest.raises(StateError, match="base"):
        fit(tmp_path, **config)


def _given(run: Path) -> str:
    return str(load_job(run / "config.toml").config.init.from_)


@pytest.mark.parametrize(
    ("overrides", "key", "value", "code"),
    [
        ({"lora__alpha": 4.0}, "lora.alpha", 4.0, "requires"),
        ({"lora__rank": -1}, "lora.rank", -1, "range"),
        ({"lora__rank": 2, "lora__patterns": ["*.wq"]}, "lora.patterns", ANY, None),
        (
            {**LORA, "optimizer__groups__head__patterns": ["embedding.*"]},
            "optimizer.groups.head.patterns",
            ...,
            "frozen",
        ),
    ],
)
def test_a_table_that_fits_no_run_is_rejected(
    tmp_path: Path, overrides: dict[str, Any], key: str, value: Any, code: str | None
) -> None:
    with rejects(key, value, code, ConfigError):
        fit(tmp_path, **overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_parents_and_runs_that_do_not_fit_are_rejected(
    tmp_path: Path, trunk: Path, tuned: Path
) -> None:
    fit(
        tmp_path / "path",
        init__from=str(tuned / "checkpoints/step-00000008"),
        **LORA,
        train__steps=1,
    )
    moments: dict[str, Any] = {**LORA, "init__keep": ["weights", "optimizer"]}
    for parent, more, key, value, code in (
        (tuned, {}, "init.from", str(tuned), "adapters"),
        (trunk, moments, "lora.rank", 3, "changed"),
        (
            tuned,
            {**LORA, "init__patterns": ["layers.*"]},
            "init.patterns",
            ["layers.*"],
            "adapters",
        ),
        (tuned, {**LORA, "lora__rank": 4}, "lora.rank", 4, "changed"),
    ):
        with rejects(key, value, code, ConfigError):
            fit(tmp_path, init__from=str(parent), **more)
    copy = shutil.copytree(tuned / "checkpoints/step-00000008", tmp_path / "alone")
    with rejects("init.from", str(copy), "base", ConfigError):
        fit(tmp_path, init__from=str(copy), **LORA)
    run = shutil.copytree(trunk, tmp_path / "run")
    with rejects("lora.rank", 3, "base", ConfigError):
        fit(tmp_path, **LORA)
    with rejects("--adapter", ..., "requires", ConfigError):
        export_run(run, tmp_path / "out", adapter=True)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_folder_of_hugging_face_is_a_base(tmp_path: Path, trunk: Path, tuned: Path) -> None:
    export_run(trunk, tmp_path / "hf")
    fit(tmp_path, init__from=str(tmp_path / "hf"), **LORA, **EIGHT)
    runs.assert_same_bits(
        dict(read_tensors(tmp_path / "run/base")), dict(read_tensors(tuned / "base"))
    )
    runs.assert_same_bits(runs.saved_tensors(tmp_path / "run"), runs.saved_tensors(tuned))


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_other_trained_weights_than_adapters_are_in_the_checkpoints(tmp_path: Path) -> None:
    experts = {"model__moe__num_experts": 4, "model__moe__bias_update_rate": 0.1}
    tied = {"model__tie_embeddings": True, "optimizer__ema__decay": 0.5}
    trainer = fit(tmp_path, **experts, **tied, **LORA, train__steps=4)
    biases = {n: b for n, b in trainer.model.named_buffers() if n.endswith("expert_bias")}
    assert len(biases) == 2
    assert any(bias.abs().max() > 0 for bias in biases.values())
    model, _, _ = load_trained(tmp_path / "run")
    for name, bias in biases.items():
        assert torch.equal(model.get_buffer(name), bias)
    fit(tmp_path, **experts, **tied, **LORA, train__steps=6)
    fit(tmp_path / "whole", **experts, **tied, **LORA, train__steps=6)
    runs.assert_same_bits(
        runs.saved_tensors(tmp_path / "run"), runs.saved_tensors(tmp_path / "whole/run")
    )


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_files_that_lie_in_base_stay(tmp_path: Path, trunk: Path) -> None:
    base = tmp_path / "run/base"
    export_run(trunk, base)
    before = {f.name: f.read_bytes() for f in base.iterdir()}
    with rejects("path", str(base), "foreign", StateError):
        fit(tmp_path, init__from=str(trunk), **LORA, train__steps=3)
    assert {f.name: f.read_bytes() for f in base.iterdir()} == before
    shutil.rmtree(base)
    base.mkdir()
    (base / "notes.txt").write_text("mine")
    fit(tmp_path, init__from=str(trunk), **LORA, train__steps=3)
    assert (base / "notes.txt").read_text() == "mine"
    assert load_trained(tmp_path / "run")[2] == 3


class Poison(Callback):
    """Breaks a frozen weight, once."""

    done = False

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 5 and not self.done:
            self.done = True
            with torch.no_grad():
                trainer.model.get_parameter("norm.weight").fill_(float("nan"))


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_rollback_restores_the_frozen_weights(tmp_path: Path, trunk: Path) -> None:
    back = {"resilience__nonfinite__action": "rollback", "resilience__nonfinite__max_in_a_row": 1}
    more = {**LORA, **EIGHT, "checkpoint__every_steps": 2}
    trainer = fit(tmp_path, Poison(), init__from=str(trunk), **back, **more)
    assert trainer.progress.step == 8
    assert trainer.model.get_parameter("norm.weight").isfinite().all()


@pytest.mark.lane("quick")
def test_F126_values_of_a_builder_stay_and_another_model_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {
        "model__name": "forge_testing.models:bigram",
        "lora__patterns": ["head"],
        **LORA,
    }
    (tmp_path / "job.toml").write_text("")

    def run(steps: int) -> Trainer:
        flat = {key.replace("__", "."): value for key, value in job.items()}
        path = write_job(tmp_path)
        path.write_text(path.read_text().replace("dim = 16\nnum_layers = 1\nnum_heads = 2\n", ""))
        trainer = Trainer(load_job(path, {**QUIET, **flat, "train.steps": steps}))
        trainer.fit()
        return trainer

    built = models.bigram(257)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.fill_(0.125)
    monkeypatch.setattr(models, "bigram", lambda vocab_size: copy.deepcopy(built))
    trainer = run(2)
    frozen = [p for n, p in trainer.model.named_parameters() if "lora" not in n]
    assert frozen
    assert all((p == 0.125).all() for p in frozen), "a builder's values stay"
    built.more = torch.nn.Parameter(torch.zeros(2))
    with rejects("", ["more"], "model", ConfigError):
        run(3)


def test_other_adapters_of_the_same_shape_are_reported(
    tmp_path: Path, tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {**LORA, "lora__alpha": 60.0, "train__steps": 1, "metrics__console": "plain"}
    fit(tmp_path, init__from=str(tuned), **more)
    assert re.search(r"init: lora\.alpha .*\b6\.0\b.*\b60\.0\b", capsys.readouterr().out)
    fit(tmp_path / "fresh", **LORA, train__steps=1, metrics__console="plain")
    shown = capsys.readouterr().out
    assert re.search(r"init: init\.from .*\[lora\]", shown)
    assert re.search(r"lora: 8 .*\b2 q_proj\b", shown)  # F155


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_an_adapter_names_the_folder_of_its_base(tmp_path: Path, trunk: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    export_run(trunk, tmp_path / "hf")
    fit(tmp_path / "a", init__from=str(tmp_path / "hf"), **LORA, train__steps=2)
    fit(tmp_path / "b", init__from=str(tmp_path / "a/run"), **LORA, train__steps=2)
    fit(tmp_path / "c", init__from=str(trunk), **LORA, train__steps=2)
    for name, base in (("a", str(tmp_path / "hf")), ("b", str(tmp_path / "hf")), ("c", None)):
        export_run(tmp_path / name / "run", tmp_path / "out" / name, adapter=True, dtype="bf16")
        settings = json.loads((tmp_path / "out" / name / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == base
        assert (
            json.loads((tmp_path / "out" / name / "forge.json").read_text())["base_dtype"] == "bf16"
        )
        tensors = load_file(tmp_path / "out" / name / "adapter_model.safetensors")
        assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    with rejects("--check", ..., "excludes", ConfigError):
        export_run(tmp_path / "a/run", tmp_path / "no", adapter=True, check=True)


def test_a_fork_is_loaded_where_it_was_moved_to(tmp_path: Path, trunk: Path) -> None:
    parent = shutil.copytree(trunk, tmp_path / "parent")
    fit(tmp_path, init__from=str(parent), **LORA, train__steps=2)
    shutil.rmtree(parent)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert load_trained(tmp_path / "moved")[2] == 2


def test_rates_of_one_matrix_are_groups(tmp_path: Path) -> None:
    groups = {
        "optimizer__groups__b__patterns": ["*.lora_b"],
        "optimizer__groups__b__lr_multiplier": 16.0,
    }
    trainer = fit(tmp_path, **LORA, **groups, train__steps=2)
    rates = {g.get("group"): g["lr"] for g in trainer.optimizer.param_groups}
    assert rates["b"] == pytest.approx(16.0 * rates[None])

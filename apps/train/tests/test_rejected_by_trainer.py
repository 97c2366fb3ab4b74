"""What the trainer rejects, each by the function that finds it: nothing is trained."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from forge_ckpt import CorruptCheckpoint, StoreInUse
from forge_parallel import ParallelConfig
from forge_testing import write_job
from forge_testing.problems import assert_problem, rejects
from forge_train import ConfigError, JobError, StateError, Trainer, load_job
from forge_train.build import build, data, evaluation, layout
from forge_train.build.begin_tokens import run_layers
from forge_train.build.objective import find_objective
from forge_train.build.run_directory import RunDirectory
from forge_train.config.init import InitConfig, Source
from forge_train.config.model import BuiltInModelConfig
from forge_train.loop import assemble, fork, initial
from forge_train.metrics import sinks
from forge_train.run.checkpoints import Checkpoints, base_problems, store_errors

pytestmark = pytest.mark.lane("test")

RANKS = {"tp": 1, "cp": 1, "pp": 1, "ep": 1}
TINY: dict[str, Any] = {"vocab_size": 8, "dim": 8, "num_layers": 1, "num_heads": 2}
Fake: Any = SimpleNamespace


def found(problems: Iterable[Any], key: str, value: Any, code: str) -> None:
    """Assert that a function found this problem."""
    assert_problem(ConfigError(problems), key, value, code)


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "full")


def no_sums(model: nn.Module, batch: Any) -> torch.Tensor:
    return torch.zeros(2)


def test_models_that_are_not_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "model_builder", lambda section: lambda: 3)
    with rejects("model.name", "a:b", "type", ConfigError):
        build.build_model(Fake(name="a:b"), 0)
    agreement = Fake(exchange=lambda digest: [digest, "other"])
    with rejects("model.name", ..., "mismatch", ConfigError, where="[1]"):
        imported, meshes = Fake(model=Fake(is_built_in=False)), Fake(world_size=2)
        assemble.shard(nn.Linear(2, 2), imported, meshes, agreement)
    ranks = Fake(**RANKS)
    config = Fake(
        train=Fake(loss=layout.FUSED),
        metrics=Fake(gradients_every_steps=0),
        sample=Fake(max_new_tokens=0),
        model=Fake(name="a:b"),
        parallel=ParallelConfig(),
        data=Fake(seq_len=8),
    )
    model = nn.Linear(2, 2)
    problems = layout.model_problems(model, config, ranks)
    found(problems, "train.loss", layout.FUSED, "unsupported")
    config.train.loss, config.sample.max_new_tokens = "cross_entropy", 4
    problems = layout.model_problems(model, config, ranks)
    found(problems, "sample.max_new_tokens", 4, "unsupported")
    config.metrics.gradients_every_steps = 2
    monkeypatch.setattr(layout, "num_experts_by_layer", lambda model: {"0": 2})
    problems = layout.model_problems(model, config, Fake(tp=2))
    found(problems, "metrics.gradients_every_steps", 2, "experts")


def test_positions_that_are_not_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Fake(positions=torch.zeros(1, 3, 4))
    config = Fake(model=BuiltInModelConfig(**TINY))
    monkeypatch.setattr(data, "extra_problems", lambda *_: [])
    problems = data._batch_problems(config, nn.Module(), batch, Fake(), "[data]")
    found(problems, "model.mrope", ..., "missing")


def test_questions_with_images() -> None:
    with rejects("data.sources", ..., "missing", ConfigError):
        evaluation.prompts_of(Fake(data=Fake(sources={})))


def test_encoders_of_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = Fake(encoder=str(tmp_path), from_="runs/a")
    config = Fake(init=init, run=Fake(dir=tmp_path / "run"), model=None)
    with rejects("init.encoder", str(tmp_path), "encoder", ConfigError):
        initial.find_encoder(config, nn.Module(), None)
    monkeypatch.setattr(initial, "VLMModelConfig", SimpleNamespace)
    config.model = Fake(vision=Fake(name="transformers"))
    taken = Fake(weights=Fake(copied=["vision.model.w"]))
    with rejects("init.encoder", str(tmp_path), "excludes", ConfigError):
        initial.find_encoder(config, nn.Module(), taken)


def test_forks_of_adapters_and_text(tmp_path: Path) -> None:
    run = InitConfig(from_="runs/a")
    with rejects("init.from", "runs/a", "adapters", ConfigError):
        fork._base(run, Fake(run=tmp_path), trains=False)
    part = InitConfig(from_="runs/a", patterns=("norm.*",))
    with rejects("init.patterns", ["norm.*"], "adapters", ConfigError):
        fork._base(part, Fake(run=tmp_path), trains=True)
    with rejects("init.from", "runs/a", "base", ConfigError):
        fork._base(run, Fake(run=None), trains=True)

    job = Fake(config=Fake(init=run, model=Fake(fusion=Fake(name="moma"))))
    here, there = {"w": torch.zeros(2)}, {"w": torch.zeros(2), "other": torch.zeros(2)}
    with rejects("model.fusion.name", "moma", "initial", ConfigError) as caught:
        fork._match_text(job, here, there, {"model.dim": [8, 16]})
    assert_problem(caught.value, "model.dim", 16, "changed")
    assert_problem(caught.value, "init.from", "runs/a", "unused")
    averaged = Fake(config=Fake(init=InitConfig(from_="runs/a", keep=("weights", "optimizer")), optimizer=Fake(ema=Fake(decay=None))))  # fmt: skip
    problems = fork._other_average(averaged, Fake(path=tmp_path), averaged=True)
    found(problems, "optimizer.ema.decay", ..., "missing")


def test_forks_of_a_source_that_cannot_be_read(tmp_path: Path) -> None:
    init = InitConfig(from_="runs/a")
    with rejects("init.from", "runs/a", "damaged", StateError), fork._source_errors(init, tmp_path):
        raise CorruptCheckpoint("a block")
    gone = tmp_path / "gone"
    with rejects("init.from", "runs/a", "removed", ConfigError), fork._source_errors(init, gone):
        raise OSError(2, "none")
    source = Source(path=Path("hf"), run=None)  # type: ignore[call-arg]
    with rejects("run.dir", str(tmp_path), "room", JobError):
        fork.Fork(init, source, Fake(), hf=Fake(write=full, files=dict)).write(tmp_path)


def test_F195_a_base_of_other_adapters_or_none(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (run.checkpoint(2)).mkdir(parents=True)
    (run.checkpoint(2) / "manifest.json").touch()
    config = Fake(lora=Fake(rank=2))
    for text in (None, "", "[lora]\nrank = 0\n"):
        if text is not None:
            run.config.write_text(text)
        found(base_problems(config, run), "lora.rank", 2, "base")
    run.config.write_text("[lora]\nrank = 2\n")  # F195: of a run that had a base
    with rejects("base", str(run.base), "missing", StateError):
        base_problems(config, run)


def test_checkpoints_that_contradict_themselves(tmp_path: Path) -> None:
    (tmp_path / "model.toml").touch()
    store = Fake(path=tmp_path / "checkpoints", steps=lambda: [], load=lambda state, check: None)
    loader = Fake(stream=Fake(fingerprint=lambda: "here"))
    run = Fake(
        config=Fake(checkpoint=Fake(max_failed_saves=3)),
        folder=RunDirectory(tmp_path),
        course=Fake(tokens=lambda cursor, windows: 5),
        loader=loader,
    )
    checkpoints = Checkpoints(run, store, {})
    with rejects("", str(store.path), "not_found", StateError):
        checkpoints.load()
    saved = {"progress": {"step": 2, "tokens": 4}, "loader": {"cursor": 1, "fingerprint": "there"}}
    with rejects("progress.step", 2, "mismatch"):
        checkpoints._check_saved(3, saved)
    with rejects("data.phases", ..., "changed", StateError):
        checkpoints._check_saved(2, saved)
    saved["loader"]["fingerprint"] = "here"
    with rejects("progress.tokens", 4, "mismatch"):
        checkpoints._check_saved(2, saved)
    in_use = rejects("run.dir", str(tmp_path), "in_use", ConfigError)
    with in_use, store_errors(store.path, StateError):
        raise StoreInUse("by process 7")


def test_layouts_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further rules are in tests of forge_vlm."""
    monkeypatch.setattr(layout, "VLMModelConfig", SimpleNamespace)
    model = Fake(bidirectional="image", fusion=Fake(name="joint_decoder", moma=None))
    job = Fake(model=model, eval=Fake(exact_match=Fake(path="q.jsonl")))
    found(layout._images(job, Fake(**RANKS | {"cp": 2})), "parallel.cp", 2, "bidirectional")
    problems = layout._answers(job, Fake(**RANKS | {"tp": 2}))
    found(problems, "eval.exact_match.path", ..., "layout")


def test_layouts_of_pipelines_and_probes(tmp_path: Path) -> None:
    phases = {"data.phases.late.start_tokens": 64, "data.phases.late.seq_len": 16}
    config = load_job(write_job(tmp_path), phases).config
    stages: Any = Fake(pp=2, tp=1, compile=False, float8="none")
    of = Fake(data=config.data, train=config.train, parallel=stages, metrics=Fake(gradients_every_steps=3))  # fmt: skip
    found(layout._phases(of, Fake(**RANKS)), "data.phases", ..., "pipeline")
    probes = layout._gradients(of, Fake(cp=1, pp=2, ep=1))
    found(probes, "metrics.gradients_every_steps", 3, "layout")
    of.train = Fake(objective="a:b")
    found(layout._objective(of, Fake(**RANKS)), "train.objective", "a:b", "pipeline")


def test_objectives_and_groups_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = find_objective(Fake(objective=f"{__name__}:no_sums", objective_options={}))
    with rejects("train.objective", f"{__name__}:no_sums", "type", ConfigError):
        own(nn.Module(), None)  # type: ignore[misc]
    with rejects("meshes", 2, "mismatch", ConfigError):
        Trainer(load_job(write_job(tmp_path))).prepare(Fake(batch_size=2))
    wanted = Fake(tensorboard=False, sinks={n: Fake(name="mlflow") for n in "ab"})
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    problems = list(sinks.sink_problems(wanted))
    found(problems, "metrics", ..., "requires")
    found(problems, "metrics.sinks", "mlflow", "duplicate")


def test_F222_a_key_that_an_older_run_lacks_may_be_written_with_its_default(tmp_path: Path) -> None:
    file, paths = write_job(tmp_path), RunDirectory(tmp_path / "run")
    paths.path.mkdir()
    text = load_job(file).to_toml()
    for key, default, other in (("model.norm_eps", 1e-5, 1e-6), ("train.max_grad_norm", 1.0, 2.0)):
        older = [line for line in text.splitlines() if not line.startswith(key.partition(".")[2])]
        paths.config.write_text("\n".join(older))
        for value, changed in ((default, {}), (other, {key: [None, other]})):
            assert paths.changes(load_job(file, {key: value})) == changed


def test_F195_folders_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with rejects("run.dir", str(tmp_path / "file"), "write", ConfigError):
        RunDirectory(tmp_path / "file").create()
    job, paths = load_job(write_job(tmp_path)), RunDirectory(tmp_path / "run")
    paths.path.mkdir()
    for file, code, read in (
        (paths.imported, "imported", paths.changes_of_import),
        (paths.config, "damaged", paths.changes),
    ):
        file.write_text("[")
        with rejects("", str(file), code, ConfigError):
            read(job)
    for empty in ("", "# nothing\n"):  # F195: of each key it said that it was None before
        paths.config.write_text(empty)
        for look in (lambda: paths.changes(job), lambda: run_layers(paths)):
            with rejects("", str(paths.config), "damaged", ConfigError):
                look()
    changes = {"run.seed": [0, 1], "optimizer.ema.decay": ["none", 0.9]}
    monkeypatch.setattr(paths, "changes", lambda job: changes)
    monkeypatch.setattr(paths, "has_checkpoints", lambda: True)
    with rejects("run.seed", 1, "fixed", ConfigError) as caught:
        paths.allowed_changes(job)
    assert_problem(caught.value, "optimizer.ema.decay", 0.9, "average")
    paths.config.unlink()
    paths.config.mkdir()
    with rejects("run.dir", str(paths.path), "room", JobError):
        paths.record(job, ["here"])

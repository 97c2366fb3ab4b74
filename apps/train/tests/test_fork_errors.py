"""What a fork refuses, in the description or in the constructor: before a process group, and before a file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from forge_testing import write_job
from forge_testing.problems import ANY, assert_problem, rejects
from forge_train import DataError, JobError, Trainer, load_job
from forge_train.hf.exporting import export_run
from forge_train.hf.importing import import_folder
from forge_train.loop.fork import find_fork

pytestmark = pytest.mark.lane("test")

ALL = ["weights", "optimizer", "cursor"]
MOMENTS = ["weights", "optimizer"]
NO_MOMENTS = ["weights", "cursor"]
SGD = "forge_testing.models:PlainSGD"
MLA: dict[str, Any] = {"model__mixer": "mla", "model__mla__kv_lora_rank": 8}
MUP: dict[str, Any] = {"model__parametrization": "mup", "init__keep": MOMENTS}
AVERAGE: dict[str, Any] = {"optimizer__ema__decay": 0.9}
VOCABULARY: dict[str, Any] = {"model__vocab_size": 300, "init__patterns": ["lm_head.*", "norm.*"]}
QUIET = {"metrics.console": "off", "sample.max_new_tokens": 0, "eval.every_steps": 0}


def build(folder: Path, **overrides: Any) -> Trainer:
    folder.mkdir(parents=True, exist_ok=True)
    flat = {key.replace("__", "."): value for key, value in overrides.items()}
    return Trainer(load_job(write_job(folder), {**QUIET, **flat}))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A run with checkpoints 2 and 4, the same as a folder of Hugging Face, an import of that, and folders that are
    nothing."""
    root = tmp_path_factory.mktemp("places")
    build(root / "parent", train__steps=4, checkpoint__every_steps=2).fit()
    run = root / "parent/run"
    export_run(run, root / "hf")
    import_folder(root / "hf", root / "import")
    shutil.copytree(run / "checkpoints/step-00000002", root / "copy")
    (root / "empty").mkdir()
    (root / "unsaved/checkpoints/step-00000002.tmp-1").mkdir(parents=True)
    (root / "unsaved/checkpoints/step-00000002.tmp-1/manifest.json").touch()
    return {
        name: str(root / name) for name in ("hf", "import", "copy", "empty", "unsaved", "none")
    } | {
        "run": str(run),
        "step": str(run / "checkpoints/step-00000002"),
    }


FROM = "the source"


def case(place: str, key: str, value: Any, code: str, **overrides: Any) -> Any:
    name = "-".join([place, *(f"{k}={v}" for k, v in overrides.items())])
    return pytest.param(place, overrides, key, value, code, id=name)


@pytest.mark.parametrize(
    ("place", "overrides", "key", "value", "code"),
    [
        case("none", "init.from", FROM, "not_found"),
        case("none@4", "init.from", FROM, "not_found"),
        case("empty", "init.from", FROM, "unknown"),
        case("unsaved", "init.from", FROM, "empty"),
        case("run@3", "init.from", FROM, "step"),
        case("run@-2", "init.from", FROM, "not_found"),
        # keep and patterns
        case("run", "init.keep", ["optimizer"], "weights", init__keep=["optimizer"]),
        case("run", "init.keep", [], "weights", init__keep=[]),
        case("run", "init.keep", ["weights"] * 2, "weights", init__keep=["weights"] * 2),
        case("run", "init.keep", NO_MOMENTS, "moments", init__keep=NO_MOMENTS),
        case("run", "init.keep", "weight", "unknown", init__keep=["weight"]),
        case("run", "init.patterns", ["*"], "excludes", init__patterns=["*"], init__keep=MOMENTS),
        case("run", "init.seed", -1, "range", init__seed=-1),
        case("run", "data.seed", -1, "range", data__seed=-1),
        case("run", "init.patterns", "layer.*", "unmatched", init__patterns=["norm.*", "layer.*"]),
        # another model
        case("run", "model.dim", 32, "changed", model__dim=32),
        case("run", "model.mixer", "mla", "changed", **MLA),
        case("run", "model.mla.kv_lora_rank", 8, "changed", **MLA),
        case("import", "model.dim", 32, "changed", model__dim=32),
        case("step", "model.dim", 32, "changed", model__dim=32),
        case("copy", "embedding.weight", (257, 32), "shape", model__dim=32),
        case("run", "lm_head.weight", (300, 16), "shape", **VOCABULARY),
        case("run", "model.num_layers", 2, "changed", model__num_layers=2),
        case("run", "model.tie_embeddings", True, "changed", model__tie_embeddings=True),
        case("copy", "init.from", FROM, "model", model__num_layers=2),
        case("copy", "init.from", FROM, "model", model__tie_embeddings=True),
        case("run", "model.num_heads", 4, "changed", model__num_heads=4, init__keep=ALL),
        # moments, and the way on
        case("run", "optimizer.name", SGD, "changed", optimizer__name=SGD, init__keep=MOMENTS),
        case("run", "model.parametrization", "mup", "changed", **MUP),
        case("run", "optimizer.ema.decay", 0.9, "average", **AVERAGE, init__keep=MOMENTS),
        case("copy", "optimizer.ema.decay", 0.9, "average", **AVERAGE, init__keep=ALL),
        case("import", "init.keep", MOMENTS, "missing", init__keep=MOMENTS),
        case("run", "train.steps", 4, "range", train__steps=4, init__keep=ALL),
        # folders of Hugging Face
        case("hf", "init.keep", MOMENTS, "weights", init__keep=MOMENTS),
        case("hf", "model.num_heads", 4, "weights", model__num_heads=4),
        case("hf", "init.patterns", "heads.*", "unmatched", init__patterns=["*", "heads.*"]),
    ],
)
def test_invalid_arguments_are_rejected(
    tmp_path: Path,
    places: dict[str, str],
    place: str,
    overrides: dict[str, Any],
    key: str,
    value: Any,
    code: str,
) -> None:
    name, at, step = place.partition("@")
    source = places[name] + at + step
    with rejects(key, source if value == FROM else value, code, JobError) as caught:
        build(tmp_path, **{"init__from": source, "train__steps": 6, **overrides})
    if code == "changed":  # not the tensors that this changes
        assert {p.code for p in caught.value.problems} == {"changed"}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "key", "value", "code"),
    [
        ({"init__keep": ALL}, "init.keep", ALL, "requires"),
        ({"init__patterns": ["*"]}, "init.patterns", ["*"], "requires"),
        ({"init__from": "/"}, "init.from", "/", "missing"),
    ],
)
def test_keys_without_a_source(
    tmp_path: Path, overrides: dict[str, Any], key: str, value: Any, code: str
) -> None:
    with rejects(key, value, code, JobError):
        build(tmp_path, **overrides)


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    "other", [{"data__seed": 7}, {"run__seed": 7}, {"data__seq_len": 16}], ids=str
)
def test_other_data_is_rejected_with_what_differs(
    tmp_path: Path, places: dict[str, str], other: dict[str, int]
) -> None:
    length = ["packing.plan", "packing.seq_len"]
    value = length if "data__seq_len" in other else ["order.seed"]
    with rejects("fingerprint", value, "mismatch", DataError) as caught:
        build(tmp_path, init__from=places["run"], init__keep=ALL, train__steps=6, **other)
    assert_problem(caught.value, "init.keep", ALL, "data")
    build(tmp_path, init__from=places["run"], init__keep=MOMENTS, **other)  # begins its own


def test_weights_of_another_parametrization_load_with_a_warning(
    tmp_path: Path, places: dict[str, str]
) -> None:
    trainer = build(tmp_path, init__from=places["run"], model__parametrization="mup")
    fork = find_fork(trainer.job, trainer.model, trainer.loader, trainer.total_steps)
    assert fork is not None
    assert (fork.changed or {})["model.parametrization"] == ["standard", "mup"]
    assert any("model.parametrization" in line for line in fork.lines())


def test_moments_of_another_base_of_mup_are_rejected(tmp_path: Path) -> None:
    """Gradients of another multiplier of the logits are of another size."""
    mup: dict[str, Any] = {"model__parametrization": "mup", "train__steps": 2}
    build(tmp_path / "parent", **mup, checkpoint__every_steps=2).fit()
    keys = {**mup, "init__from": str(tmp_path / "parent/run"), "init__keep": MOMENTS}
    build(tmp_path / "same", **keys)
    with rejects("model.mup.base_dim", 8, "changed", JobError):
        build(tmp_path / "other", **keys, model__mup__base_dim=8)


def test_a_fork_has_a_folder_of_its_own(places: dict[str, str]) -> None:
    folder = Path(places["run"]).parent
    before = sorted(folder.rglob("*"))
    for source in (places["run"], places["run"] + "@2", places["run"] + "/", places["step"]):
        with rejects("run.dir", ANY, "parent", JobError):
            build(folder, init__from=source, train__steps=6)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_run_that_has_begun_takes_no_other_beginning(
    tmp_path: Path, places: dict[str, str]
) -> None:
    init = {"init__from": places["run"], "init__keep": MOMENTS}
    build(tmp_path, train__steps=2, **init).fit()
    for change, key in (
        ({"init__from": places["step"]}, "init.from"),
        ({"init__keep": ["weights"]}, "init.keep"),
        ({"init__seed": 4}, "init.seed"),
    ):
        with rejects(key, change[key.replace(".", "__")], "fixed", JobError):
            build(tmp_path, train__steps=3, **{**init, **change}).fit()
    fresh = tmp_path / "fresh"
    build(fresh, train__steps=2).fit()
    with rejects("init.from", places["run"], "fixed", JobError):
        build(fresh, train__steps=3, **init).fit()


def test_a_checkpoint_that_is_removed_while_it_is_read(
    tmp_path: Path, places: dict[str, str]
) -> None:
    parent = shutil.copytree(places["run"], tmp_path / "parent")
    for keep in (ALL, ["weights"]):
        trainer = build(tmp_path, init__from=f"{parent}@2", init__keep=keep)
        kept = shutil.move(parent / "checkpoints/step-00000002", tmp_path / "kept")
        with rejects("init.from", f"{parent}@2", "removed", JobError):
            trainer.fit()
        shutil.move(kept, parent / "checkpoints/step-00000002")
        assert not list((tmp_path / "run/checkpoints").glob("step-*"))
    assert not (tmp_path / "run/parent.json").exists()

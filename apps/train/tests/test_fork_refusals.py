"""What a fork refuses, in the description or in the constructor: before a process group, and before a file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from forge_testing import write_job
from forge_train import DataError, JobError, Trainer, load_job
from forge_train.hf.exporting import export_run
from forge_train.hf.importing import import_folder

pytestmark = pytest.mark.lane("test")

ALL = ["weights", "optimizer", "cursor"]
MOMENTS = ["weights", "optimizer"]
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


def case(place: str, wanted: str, **overrides: Any) -> Any:
    name = "-".join([place, *(f"{k}={v}" for k, v in overrides.items())])
    return pytest.param(place, overrides, wanted, id=name)


@pytest.mark.parametrize(
    ("place", "overrides", "wanted"),
    [
        case("none", "no folder here; name a run, one of its checkpoints, or a folder of Hugging"),
        case("none@4", "none is no folder here"),
        case("empty", "is no run .* no checkpoint .* and no folder of Hugging Face"),
        case("unsaved", "has no committed checkpoint; train it until it has saved"),
        case("run@3", "there is no checkpoint of step 3, .* there are 2, 4$"),
        case("run@-2", "no folder here"),
        # keep and patterns
        case("run", r"init: keep \['optimizer'\] must hold 'weights'", init__keep=["optimizer"]),
        case("run", r"init: keep \[\] must hold 'weights'", init__keep=[]),
        case("run", "no word twice", init__keep=["weights", "weights"]),
        case("run", "without its moments; add 'optimizer'", init__keep=["weights", "cursor"]),
        case("run", "init.keep.*must be 'weights' or 'optimizer' or", init__keep=["weight"]),
        case("run", "and keep .* the moments of all", init__patterns=["*"], init__keep=MOMENTS),
        case("run", "init: seed -1 must be from 0 to", init__seed=-1),
        case("run", "data: seed -1 must be a whole number of at least 0", data__seed=-1),
        case(
            "run",
            r"pattern 'layer.\*' matches no tensor .* did you mean 'layers.\*'?",
            init__patterns=["norm.*", "layer.*"],
        ),
        # another model
        case(
            "run",
            r"^model.dim was 16 in .*/run and is now 32, and init.from takes all weights; set it back, or name [^\n]*$",
            model__dim=32,
        ),
        case(
            "run",
            r"^model.mixer was 'attention' in [^\n]*\nmodel.mla.kv_lora_rank was 'none' in [^\n]* is now 8, [^\n]*$",
            model__mixer="mla",
            model__mla__kv_lora_rank=8,
        ),
        case("import", r"^model.dim was 16 in .*/import and is now 32, [^\n]*$", model__dim=32),
        case("step", r"^model.dim was 16 in .*/run and is now 32, [^\n]*$", model__dim=32),
        case(
            "copy",
            r"norm.weight: saved \(16,\), here \(32,\)",
            model__dim=32,
        ),
        case(
            "run",
            r"lm_head.weight: saved \(257, 16\), here \(300, 16\); '!lm_head.weight' excludes it",
            model__vocab_size=300,
            init__patterns=["lm_head.*", "norm.*"],
        ),
        case(
            "run",
            r"^model.num_layers was 1 in .* and is now 2, and [^\n]*$",
            model__num_layers=2,
        ),
        case("run", "^model.tie_embeddings was False .* now True", model__tie_embeddings=True),
        case(
            "copy",
            r"is of another model: layers.1.* only here; .* init.patterns = \['\*'\] takes",
            model__num_layers=2,
        ),
        case("copy", "lm_head.weight only there", model__tie_embeddings=True),
        case("run", "model.num_heads was 2 in .* and is now 4", model__num_heads=4, init__keep=ALL),
        # moments, and the way on
        case(
            "run",
            "optimizer.name was 'adamw' .* and is now 'forge_testing.models:PlainSGD'",
            optimizer__name="forge_testing.models:PlainSGD",
            init__keep=MOMENTS,
        ),
        case(
            "run",
            r"model.parametrization was 'standard' in .* and is now 'mup', and init.keep is .*; set it back, or use",
            model__parametrization="mup",
            init__keep=MOMENTS,
        ),
        case(
            "run",
            r"optimizer.ema.decay 0.9 goes on with an average .* holds none, .*; leave the decay out, or use init.keep",
            optimizer__ema__decay=0.9,
            init__keep=MOMENTS,
        ),
        case(
            "copy",
            "optimizer.ema.decay 0.9 .* holds none",
            optimizer__ema__decay=0.9,
            init__keep=ALL,
        ),
        case("import", "needs optimizer, and .* has model, imported alone", init__keep=MOMENTS),
        case("run", "length of 4 steps must be above 4", train__steps=4, init__keep=ALL),
        # folders of Hugging Face
        case("hf", "has weights alone; use keep", init__keep=MOMENTS),
        case("hf", "model.num_heads 4 must be 2, that of the weights", model__num_heads=4),
        case("hf", r"pattern 'heads.\*' matches no tensor", init__patterns=["*", "heads.*"]),
    ],
)
def test_refusals(
    tmp_path: Path, places: dict[str, str], place: str, overrides: dict[str, Any], wanted: str
) -> None:
    name, at, step = place.partition("@")
    with pytest.raises(JobError, match=wanted):
        build(tmp_path, **{"init__from": places[name] + at + step, "train__steps": 6, **overrides})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ({"init__keep": ALL}, r"keep \['weights', 'optimizer', 'cursor'\] belongs to no source"),
        ({"init__patterns": ["*"]}, r"patterns \['\*'\] belongs to no source; give from"),
        ({"init__from": "/"}, "from '/' must name a run"),
    ],
)
def test_keys_without_a_source(tmp_path: Path, overrides: dict[str, Any], wanted: str) -> None:
    with pytest.raises(JobError, match=wanted):
        build(tmp_path, **overrides)


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    "other", [{"data__seed": 7}, {"run__seed": 7}, {"data__seq_len": 16}], ids=str
)
def test_other_data_is_refused_with_what_differs(
    tmp_path: Path, places: dict[str, str], other: dict[str, int]
) -> None:
    key = "seq_len" if "data__seq_len" in other else "order.seed"
    with pytest.raises(DataError, match=rf"(?s)made from other data.*{key}: checkpoint .*, now"):
        build(tmp_path, init__from=places["run"], init__keep=ALL, train__steps=6, **other)
    build(tmp_path, init__from=places["run"], init__keep=MOMENTS, **other)  # begins its own


def test_weights_alone_of_another_parametrization_are_taken_and_said(
    tmp_path: Path, places: dict[str, str]
) -> None:
    trainer = build(tmp_path, init__from=places["run"], model__parametrization="mup")
    assert trainer.fork is not None
    assert any("model.parametrization was 'standard' there" in x for x in trainer.fork.lines())


def test_moments_of_another_base_of_mup_are_refused(tmp_path: Path) -> None:
    """Gradients of another multiplier of the logits are of another size."""
    mup: dict[str, Any] = {"model__parametrization": "mup", "train__steps": 2}
    build(tmp_path / "parent", **mup, checkpoint__every_steps=2).fit()
    keys = {**mup, "init__from": str(tmp_path / "parent/run"), "init__keep": MOMENTS}
    build(tmp_path / "same", **keys)
    with pytest.raises(JobError, match=r"model.mup.base_dim was 256 in .* and is now 8"):
        build(tmp_path / "other", **keys, model__mup__base_dim=8)


def test_a_fork_has_a_folder_of_its_own(places: dict[str, str]) -> None:
    folder = Path(places["run"]).parent
    before = sorted(folder.rglob("*"))
    for source in (places["run"], places["run"] + "@2", places["run"] + "/", places["step"]):
        with pytest.raises(JobError, match="a fork needs a folder of its own"):
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
        with pytest.raises(JobError, match=f"{key} was .* must stay within a run"):
            build(tmp_path, train__steps=3, **{**init, **change}).fit()
    fresh = tmp_path / "fresh"
    build(fresh, train__steps=2).fit()
    with pytest.raises(JobError, match=r"init\.from was .* must stay within a run"):
        build(fresh, train__steps=3, **init).fit()


def test_a_checkpoint_that_is_removed_while_it_is_read(
    tmp_path: Path, places: dict[str, str]
) -> None:
    parent = shutil.copytree(places["run"], tmp_path / "parent")
    for keep in (ALL, ["weights"]):
        trainer = build(tmp_path, init__from=f"{parent}@2", init__keep=keep)
        kept = shutil.move(parent / "checkpoints/step-00000002", tmp_path / "kept")
        with pytest.raises(JobError, match="was removed while it was read, as an old checkpoint"):
            trainer.fit()
        shutil.move(kept, parent / "checkpoints/step-00000002")
        assert not list((tmp_path / "run/checkpoints").glob("step-*"))
    assert not (tmp_path / "run/parent.json").exists()

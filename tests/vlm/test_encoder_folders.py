"""`init.encoder`: the encoder of a run begins with the weights of a folder of transformers, beside a text model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vlm.file_jobs import save_clip

from forge_testing.problems import rejects
from forge_testing.runs import assert_same_bits, fit_alone, make_job, saved_tensors
from forge_testing.squares import SIDE
from forge_testing.vlm_jobs import CLIP, TRANSFORMERS, write_vlm_job
from forge_train import ConfigError, read_run

pytestmark = pytest.mark.lane("test")

transformers = pytest.importorskip("transformers")
#: The encoder keeps what it began with.
KEYS: dict[str, Any] = {
    **TRANSFORMERS,
    "train.steps": 2,
    "optimizer.groups": {"encoder": {"patterns": ["vision.*"], "lr_multiplier": 0.0}},
}


def assert_encoder(run: Path, wanted: dict[str, torch.Tensor]) -> None:
    saved = saved_tensors(run)
    own = {n for n in saved if n.startswith("model.vision.model.")}
    assert own <= wanted.keys()
    assert len(own) > 10
    for name in own:
        assert torch.equal(saved[name], wanted[name]), name


@pytest.mark.lane("quick")
@pytest.mark.parametrize("whole", [False, True])
def test_the_encoder_begins_as_in_its_folder(
    tmp_path: Path, whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = save_clip(tmp_path / "clip", whole)
    job = write_vlm_job(tmp_path)
    keys = KEYS | {"init.encoder": str(tmp_path / "clip"), "metrics.console": "plain"}
    fit_alone(job, **keys)
    assert_encoder(tmp_path / "run", wanted)
    said = capsys.readouterr().out
    assert f"encoder of {tmp_path / 'clip'}: " in said
    (event,) = (e for e in read_run(tmp_path / "run").events if e["event"] == "encoder")
    assert event["copied"] == sum("model.vision" in n for n in saved_tensors(tmp_path / "run"))
    assert (event["unused"] > 0) == whole
    fresh = write_vlm_job(tmp_path / "fresh")
    fit_alone(fresh, **KEYS)
    with pytest.raises(AssertionError, match=r"model\.vision\.model\."):
        assert_encoder(tmp_path / "fresh/run", wanted)


@pytest.mark.slow
def test_next_to_a_text_model_and_again_after_a_stop(tmp_path: Path) -> None:
    """Both sources reach the run once: a resume goes on with its own weights."""
    wanted = save_clip(tmp_path / "clip")
    text = make_job(tmp_path / "text")
    sizes = {"model.dim": 16, "model.num_layers": 2, "model.num_heads": 2, "model.init_std": 0.2}
    small = {"model.vocab_size": 288, "data.seq_len": 8, "model.max_seq_len": 16}
    fit_alone(text, **sizes, **small, **{"train.steps": 1, "eval.every_steps": 0})
    begun = {"init.from": str(tmp_path / "text/run"), "init.encoder": str(tmp_path / "clip")}
    keys = KEYS | begun | {"model.vocab_size": 288, "train.steps": 4, "checkpoint.every_steps": 2}
    frozen = {
        "optimizer.groups": {"all": {"patterns": ["vision.*", "layers.*"], "lr_multiplier": 0.0}}
    }
    fit_alone(write_vlm_job(tmp_path / "whole"), **keys | frozen)
    assert_encoder(tmp_path / "whole/run", wanted)
    before = saved_tensors(tmp_path / "text/run")
    after = saved_tensors(tmp_path / "whole/run")
    assert all(torch.equal(after[n], t) for n, t in before.items() if n.startswith("model.layers."))

    trained = KEYS | begun | {"model.vocab_size": 288, "checkpoint.every_steps": 2}
    del trained["optimizer.groups"]
    fit_alone(write_vlm_job(tmp_path / "one"), **trained | {"train.steps": 4})
    halves = write_vlm_job(tmp_path / "two")
    fit_alone(halves, **trained | {"train.steps": 2})
    fit_alone(halves, **trained | {"train.steps": 4})
    assert_same_bits(*(saved_tensors(tmp_path / name / "run") for name in ("one", "two")))


@pytest.mark.lane("quick")
def test_a_folder_of_another_encoder_is_rejected_with_the_difference(tmp_path: Path) -> None:
    def check(folder: str, key: str, value: Any, code: str, keys: Any = ()) -> None:
        given = KEYS | {"init.encoder": str(tmp_path / folder)} | dict(keys)
        with rejects(key, value, code, ConfigError):
            fit_alone(write_vlm_job(tmp_path / "job"), **given)

    save_clip(tmp_path / "quick", hidden_act="gelu")
    check("quick", "model.vision.transformers.hidden_act", "quick_gelu", "differs")
    save_clip(tmp_path / "clip")
    (tmp_path / "clip/preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3}))
    check("clip", "model.vision.mean", [0.48145466, 0.4578275, 0.40821073], "processor")
    config = json.loads((tmp_path / "quick/config.json").read_text())
    (tmp_path / "quick/config.json").write_text(json.dumps({**config, "model_type": "dinov2"}))
    check("quick", "model.vision.transformers.model_type", "clip_vision_model", "differs")
    vit = {
        "model.vision.name": "vit",
        "model.vision.transformers": {},
        "model.vision.select_layer": [],
    }
    check("clip", "init.encoder", str(tmp_path / "clip"), "encoder", vit)
    check("nowhere", "path", str(tmp_path / "nowhere"), "not_found")
    assert CLIP["image_size"] == SIDE


def test_tensors_of_another_shape_are_rejected_with_both(tmp_path: Path) -> None:
    """Of a folder whose config does not describe its tensors."""
    save_clip(tmp_path / "clip", intermediate_size=32)
    config = json.loads((tmp_path / "clip/config.json").read_text())
    (tmp_path / "clip/config.json").write_text(json.dumps({**config, "intermediate_size": 24}))
    with rejects("encoder.layers.0.mlp.fc1.weight", (32, 16), "shape", ConfigError):
        fit_alone(write_vlm_job(tmp_path), **KEYS | {"init.encoder": str(tmp_path / "clip")})


def test_older_files_have_keys_without_a_meaning(tmp_path: Path) -> None:
    """Those of CLIP have every key of the library's first configs, and the width of a head that is not used."""
    wanted = save_clip(tmp_path / "clip")
    config = json.loads((tmp_path / "clip/config.json").read_text())
    older = {"add_cross_attention": False, "num_beams": 1, "pruned_heads": {}, "dropout": 0.0}
    older |= {"projection_dim": 768, "initializer_factor": 2.0, "transformers_version": "4.21.3"}
    nested = {"model_type": "clip", "vision_config": {**config, **older}, "projection_dim": 768}
    (tmp_path / "clip/config.json").write_text(json.dumps(nested))
    fit_alone(write_vlm_job(tmp_path), **KEYS | {"init.encoder": str(tmp_path / "clip")})
    assert_encoder(tmp_path / "run", wanted)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_run_with_an_encoder_of_its_own_gives_the_rest(tmp_path: Path) -> None:
    wanted = save_clip(tmp_path / "clip")
    fit_alone(write_vlm_job(tmp_path / "first"), **KEYS)
    begun = {"init.from": str(tmp_path / "first/run"), "init.encoder": str(tmp_path / "clip")}
    with pytest.raises(ConfigError, match=r"init\.encoder") as caught:
        fit_alone(write_vlm_job(tmp_path / "both"), **KEYS | begun)
    assert "init.patterns = ['*', '!vision.*']" in str(caught.value)
    rest = {"init.patterns": ["*", "!vision.*"]}
    fit_alone(write_vlm_job(tmp_path / "rest"), **KEYS | begun | rest)
    assert_encoder(tmp_path / "rest/run", wanted)

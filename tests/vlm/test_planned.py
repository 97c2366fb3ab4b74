"""The planner against models with images: they keep and count what it says, and only what can run is planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from forge_core import flops_per_token, initialize
from forge_parallel import ParallelConfig, materialize
from forge_parallel.plan import Profile, estimate_layout, trace
from forge_testing import vlm_jobs
from forge_testing.counts import bytes_kept
from forge_testing.problems import rejects
from forge_train import Trainer, load_job
from forge_train.build.build import build_model
from forge_train.build.layout import layout_problems, model_problems
from forge_train.cli import main
from forge_train.config.model import VLMModelConfig
from forge_vlm import (
    AdapterConfig,
    CrossAttentionConfig,
    FusionConfig,
    ModalityConfig,
    VisionConfig,
)
from forge_vlm.data import DrawnSquares
from forge_vlm.vision import ViTConfig

S, IMAGE = 64, 250
VIT = VisionConfig(vit=ViTConfig(image_size=32, patch_size=8, dim=32, num_layers=3, num_heads=4))
CLIP = VisionConfig(
    "transformers", transformers={**vlm_jobs.CLIP, "num_attention_heads": 4}, select_feature="patch"
)
QWEN3_VL = {"model_type": "qwen3_vl_vision", "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
            "out_hidden_size": 64, "patch_size": 4}  # fmt: skip
CROSS = CrossAttentionConfig(every_n_layers=2)
FUSIONS = {
    "joint_decoder": FusionConfig(),
    "cross_attention": FusionConfig("cross_attention", cross_attention=CROSS),
    "mixture_of_transformers": FusionConfig("mixture_of_transformers"),
    "moma": FusionConfig("moma"),
}


def section(fusion: str, **options: Any) -> VLMModelConfig:
    given: dict[str, Any] = {
        **{"vocab_size": 256, "dim": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
        **{"vision": VIT, "adapter": AdapterConfig("mlp"), "images_per_row": 2},
        **{"modalities": {"image": ModalityConfig(first_id=IMAGE)}, "fusion": FUSIONS[fusion]},
    }
    return VLMModelConfig(**{**given, **options})


def rows(config: VLMModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of two images each."""
    tokens = torch.randint(0, 250, (2, S), generator=torch.Generator().manual_seed(0))
    each = 1 if config.fusion.name == "cross_attention" else 16
    tokens[:, 2 : 2 + each] = tokens[:, 30 : 30 + each] = IMAGE
    return tokens, torch.zeros(4, 3, 32, 32)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_activations_are_what_a_real_forward_keeps(fusion: str, frozen: bool) -> None:
    config = section(fusion)
    built = build_model(config, 0)
    built.get_submodule("vision").requires_grad_(not frozen)
    found = trace(Profile(built, S), dtype=torch.float32, rows=2)
    model = materialize(built, torch.device("cpu"))
    initialize(model, 0)
    model.train()
    tokens, images = rows(config)
    measured = bytes_kept(model, tokens, images=images)
    blocks = sum(found.kinds[k].saved for k in Profile(built, S).order)
    said = found.first.saved + found.last.saved + found.shared + blocks
    assert said == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("fusion", FUSIONS)
def test_under_tp_and_cp_the_encoder_is_unsharded_on_each_rank(fusion: str) -> None:
    profile = Profile(build_model(section(fusion), 0), S)
    alone, many, cut = (trace(profile, tp=tp, cp=cp).first for tp, cp in ((1, 1), (2, 1), (1, 2)))
    assert many.saved > 0.9 * alone.saved
    assert cut.saved > 0.9 * alone.saved
    assert not cut.sent["cp"], "an encoder attends inside images"


def test_towers_get_full_tokens_on_every_rank_of_tp() -> None:
    """Their weights are whole there, and so are the activations inside."""
    profile = Profile(build_model(section("mixture_of_transformers"), 0), S)
    alone, many = (trace(profile, tp=tp).kinds[0].saved for tp in (1, 2))
    assert many >= 0.9 * alone


def test_flops_are_those_of_the_model_and_a_frozen_encoder_costs_a_third(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forge_parallel.plan.time.LAUNCH_SECONDS", 0.0)
    model = build_model(section("joint_decoder"), 0)
    profile = Profile(model, S)
    assert 3 * profile.flops == pytest.approx(flops_per_token(model, S))
    assert profile.first_flops > 0 == profile.first_spared

    def products() -> float:
        found = estimate_layout(model, ParallelConfig(recompute="none"), 1, global_batch=512,
                                micro_batch=512, seq_len=S, gpus_per_node=1)  # fmt: skip
        return found.time.products

    before = products()
    for part in ("vision", "adapter"):
        model.get_submodule(part).requires_grad_(False)
    frozen = Profile(model, S)
    assert frozen.first_spared == 2 * frozen.first_flops
    assert 3 * frozen.flops - frozen.first_spared == pytest.approx(flops_per_token(model, S))
    assert products() < before
    assert frozen.trained < profile.numel


@pytest.mark.parametrize("kind", ["clip_vision_model", "siglip_vision_model"])
def test_encoders_of_transformers_are_traced(kind: str) -> None:
    pytest.importorskip("transformers")
    vision = replace(CLIP, transformers={**CLIP.transformers, "model_type": kind})
    profile = Profile(build_model(section("joint_decoder", vision=vision), 0), S)
    assert trace(profile).first.saved > 0


@pytest.mark.lane("test")
def test_an_encoder_that_reads_values_is_rejected() -> None:
    pytest.importorskip("transformers")
    keys = {**QWEN3_VL, "depth": 1, "deepstack_visual_indexes": [0]}
    vision = VisionConfig("transformers", transformers=keys)
    model = build_model(section("joint_decoder", vision=vision, adapter=AdapterConfig("none")), 0)
    with rejects("vision.transformers.model_type", keys["model_type"], "planned"):
        trace(Profile(model, S))


@pytest.mark.parametrize("layers", [3, 4])
def test_F214_features_that_go_into_the_first_blocks_need_these_in_the_first_stage(
    tmp_path: Path, layers: int
) -> None:
    """Of three blocks in three stages, step 1 ended with a traceback; of four, the first stage has two."""
    pytest.importorskip("transformers")
    keys = {**QWEN3_VL, "depth": 2, "deepstack_visual_indexes": [0, 1]}
    vision = VisionConfig("transformers", transformers=keys)
    qwen = section("joint_decoder", vision=vision, num_layers=layers, adapter=AdapterConfig("none"))
    config = load_job(vlm_jobs.write_vlm_job(tmp_path), {"train.micro_batch": 3}).config
    config = replace(config, model=qwen, parallel=replace(config.parallel, pp=3))
    model = build_model(qwen, 0)
    found = layout_problems(config, 3), [*model_problems(model, config, config.parallel.axes(3))]
    if layers == 3:
        for problems, key in zip(found, ("model.num_layers", "num_layers")):
            assert [(p.key, p.code, p.value) for p in problems] == [(key, "stages", 3)]
    else:
        assert found == ([], [])
        assert [len(stage) for stage in Profile(model, S).stage_ranges(3)] == [2, 1, 1]


DEBUG = Path(__file__).parents[2] / "apps" / "train" / "configs" / "vlm_debug.toml"


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_command_plans_what_the_runner_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*flags: str) -> int:
        with pytest.raises(SystemExit) as left:  # prose: its code is asserted
            main(["plan", str(DEBUG), "--gpus", "8", *flags])
        return int(left.value.code or 0)

    assert plan("--json") == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    cross = (
        "--model.fusion.name",
        "cross_attention",
        "--model.fusion.cross_attention.every_n_layers",
        "1",
    )
    assert plan("--parallel.pp", "2", *cross) == 78
    assert "pipeline" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_expert_choice_over_full_sequences_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = vlm_jobs.write_vlm_job(tmp_path)
    flags = {"model.fusion.name": "moma", "model.fusion.moma.router": "expert_choice"}
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    with pytest.raises(SystemExit) as left:  # prose: its code is asserted
        main(["plan", str(job), "--gpus", "4", "--eval.every_steps", "0", *words])
    assert left.value.code == 78
    assert "fusion.moma.router 'expert_choice'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_small_model_learns_colors_of_drawn_squares(tmp_path: Path) -> None:
    trainer = Trainer(load_job(DEBUG, {"run.dir": str(tmp_path / "run"), "train.steps": 50}))
    trainer.fit()
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    assert losses[-1] < 0.2, losses


@pytest.mark.lane("test")
def test_drawn_rows_are_a_function_of_seed_and_number() -> None:
    source = DrawnSquares(SimpleNamespace(split="train"), size=8, tokens=4)
    one, same = source.stream(8, 1).arrays(np.arange(4)), source.stream(8, 1).arrays(np.array([3]))
    assert (one["tokens"][3] == same["tokens"][0]).all()
    assert torch.equal(one["images"].values[3], same["images"].values[0])
    assert one["tokens"][0].tolist()[:5] == [1, 1, 1, 1, 2]
    assert one["labels"][0, 4] == one["tokens"][0, 5] >= 3
    assert one["labels"][0, 5] == 0
    held = DrawnSquares(SimpleNamespace(split="validation"), size=8, tokens=4).stream(8, 1)
    assert not torch.equal(held.arrays(np.arange(4))["images"].values, one["images"].values)
    with rejects("seq_len", 5, "range"):
        source.stream(5, 1)
    with rejects("size", 2, "range"):
        DrawnSquares(SimpleNamespace(split="train"), size=2, tokens=4)

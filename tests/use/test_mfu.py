"""The operations behind `mfu`, of the models that the runner builds, against those that torch counts in a real step.

torch knows no operations of fused attention on a CPU and none of grouped products, so attention runs as plain products
(SDPBackend.MATH) and experts as a loop. Plain products compute both halves of the causal square, of which the formula has
one: the other is added by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from forge_core import initialize
from forge_core.flops import flops_per_token
from forge_core.model import MLAConfig, MTPConfig
from forge_moe.model_section import MoESection
from forge_parallel import end_process_group, materialize
from forge_testing import write_job
from forge_train import Trainer, load_job, read_run
from forge_train.build.build import build_model
from forge_train.config.model import BuiltInModelConfig, VLMModelConfig
from forge_train.run import run
from forge_vlm import AdapterConfig, ModalityConfig, VisionConfig
from forge_vlm.vision import ViTConfig

B, S, H, LAYERS, IMAGE = 2, 48, 4, 3, 250
SIZES = {"vocab_size": 256, "dim": 64, "num_layers": LAYERS, "num_heads": H, "num_kv_heads": 2}
MLA = MLAConfig(
    q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
)
MIXTURE = MoESection(
    num_experts=8, top_k=2, num_shared_experts=1, first_dense_layers=1, backend="loop"
)
VIT = VisionConfig(vit=ViTConfig(image_size=32, patch_size=8, dim=32, num_layers=2, num_heads=4))


class Case(NamedTuple):
    options: dict[str, Any]
    score_dims: int = 2 * 16  # of a head: its dims in scores and in values
    layers: int = LAYERS
    padded_dims: int = (
        0  # of values, zeros for kernels that want them as wide as queries: not credited
    )


CASES = {
    "dense": Case({}),
    "tied": Case({"tie_embeddings": True, "feed_forward": "gelu"}),
    "mixture": Case({"moe": MIXTURE}),
    "mla": Case({"mixer": "mla", "mla": MLA, "num_kv_heads": None}, 24 + 16, padded_dims=8),
    "mtp": Case({"mtp": MTPConfig(2)}, layers=LAYERS + 2),
    "vision": Case({"vision": VIT, "adapter": AdapterConfig("mlp"), "images_per_row": 2}),
}


def build(case: Case) -> torch.nn.Module:
    if "vision" in case.options:
        places = {"image": ModalityConfig(first_id=IMAGE)}
        config: Any = VLMModelConfig(**{**SIZES, **case.options}, modalities=places)
    else:
        config = BuiltInModelConfig(**{**SIZES, **case.options})
    model = materialize(build_model(config, 0), torch.device("cpu"))
    initialize(model, 0)
    return model.train()


def step(model: torch.nn.Module, case: Case) -> None:
    tokens = torch.randint(0, IMAGE, (B, S), generator=torch.Generator().manual_seed(0))
    more: dict[str, Any] = {}
    if "vision" in case.options:
        tokens[:, 2:18] = tokens[:, 20:36] = IMAGE
        more["images"] = torch.randn(2 * B, 3, 32, 32)
    if "mtp" in case.options:
        more["next_tokens"] = torch.stack([tokens.roll(-k, 1) for k in (1, 2)], dim=1)
    model(tokens, **more).square().mean().backward()


@pytest.mark.parametrize("name", CASES)
def test_operations_of_a_step_are_those_that_torch_counts(name: str) -> None:
    case = CASES[name]
    model = build(case)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step(model, case)
    found = counter.get_total_flops() / (B * S)
    causal = flops_per_token(model, S)
    other_half = 3 * case.layers * H * case.score_dims * S
    padding = 3 * case.layers * H * 2 * case.padded_dims * S
    print(f"{name}: torch {found:.0f}, full {causal + other_half:.0f}, causal {causal:.0f}")
    # torch needs no gradient of pixels; forge_vlm's tests take that apart
    within = 0.01 if name == "vision" else 1e-6
    assert causal + other_half + padding == pytest.approx(found, rel=within)
    assert other_half / found > 0.02  # a wrong half would be seen


def test_mfu_of_a_row_is_its_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the peak of an invented device, as a CPU has none that is known."""
    peak = 1e12
    monkeypatch.setattr(run, "peak_flops", lambda device, dtype: peak)
    keys = {"train.steps": 3, "parallel.precision": "bf16", "metrics.console": "off"}
    trainer = Trainer(load_job(write_job(tmp_path), {**keys, "sample.max_new_tokens": 0}))
    try:
        trainer.fit()
    finally:
        end_process_group()
    metrics = read_run(tmp_path / "run").metrics
    per_token = flops_per_token(trainer.model, 32)
    assert len(metrics["mfu"]) == 3
    for mfu, rate in zip(metrics["mfu"], metrics["tokens_per_second"]):
        assert mfu == pytest.approx(rate * per_token / peak, rel=1e-12)
    assert metrics["flops"][-1] == pytest.approx(3 * 4 * 32 * per_token)

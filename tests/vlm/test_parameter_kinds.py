"""What each parameter of mixtures, of models with images and of transformers' modules is, as an explicit table; and that
`reset_parameters` of each module fills all of them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge_core
import forge_moe
import forge_vlm
import forge_vlm as fv
from forge_ckpt import Store
from forge_ckpt.stage_state import NamedState
from forge_core import Transformer, TransformerConfig
from forge_core.kinds import parameter_kinds
from forge_core.lora import LoRAConfig, lora
from forge_core.model import AttentionSpec, check_init_tables
from forge_core.optim import EMAConfig, OptimizerConfig, build_optimizer, hidden_matrices
from forge_moe import MoE, MoEConfig, SortedExperts
from forge_vlm.fusion import MoMaConfig
from forge_vlm.vision import ViTConfig

pytestmark = pytest.mark.lane("test")

SIZES: dict[str, Any] = {"vocab_size": 32, "dim": 8, "num_layers": 1, "num_heads": 2}
ENDS = {"embedding.weight": "embedding", "norm.weight": "norm", "lm_head.weight": "matrix"}
ATTENTION = {f"layers.0.mixer.{n}_proj.weight": "matrix" for n in "qkvo"}
NORMS = {f"layers.0.{n}_norm.weight": "norm" for n in ("mixer", "feed_forward")}
FEED_FORWARD = {f"layers.0.feed_forward.{n}_proj.weight": "matrix" for n in ("gate", "up", "down")}
VIT = {
    "vision.patches.weight": "matrix",
    "vision.patches.bias": "bias",
    "vision.positions.weight": "embedding",
    **{f"vision.layers.0.norm{i}.weight": "norm" for i in (1, 2)},
    **{f"vision.layers.0.norm{i}.bias": "bias" for i in (1, 2)},
    **{f"vision.layers.0.{n}.weight": "matrix" for n in ("qkv", "out", "up", "down")},
    **{f"vision.layers.0.{n}.bias": "bias" for n in ("qkv", "out", "up", "down")},
    "vision.norm.weight": "norm",
    "vision.norm.bias": "bias",
}
ADAPTER = {
    f"adapter.linear_{i}.{n}": k
    for i in (1, 2)
    for n, k in (("weight", "matrix"), ("bias", "bias"))
}


def stacks(prefix: str) -> dict[str, str]:
    """Those of experts with biases."""
    names = ("gate_proj", "up_proj", "down_proj")
    return {f"{prefix}.{n}": "stacked_matrix" for n in names} | {
        f"{prefix}.{n}_bias": "stacked_bias" for n in names
    }


def mixture() -> nn.Module:
    own = MoEConfig(8, 16, 4, bias=True, router_bias=True, num_shared_experts=1, shared_gate=True)
    return Transformer(TransformerConfig(**SIZES), feed_forward=lambda layer: MoE(own))


def vlm(**options: Any) -> nn.Module:
    vision = fv.VisionConfig(
        vit=ViTConfig(image_size=8, patch_size=4, dim=8, num_layers=1, num_heads=2)
    )
    return fv.VLM(
        fv.VLMConfig(
            **SIZES, **{"vision": vision, "modalities": {"image": fv.ModalityConfig(31)}, **options}
        )
    )


def cross() -> nn.Module:
    own = fv.CrossAttentionConfig(every_n_layers=1, qk_norm=True)
    return vlm(fusion=fv.FusionConfig("cross_attention", cross_attention=own))


def moma() -> nn.Module:
    def experts(group: str, num: int) -> nn.Module:
        return SortedExperts(MoEConfig(8, 16, num, top_k=2, bias=True))

    own = fv.FusionConfig("moma", moma=MoMaConfig(num_experts=2))
    discrete = {"image": fv.ModalityConfig(16, 8, discrete=True)}
    config = fv.VLMConfig(**SIZES, vision=fv.VisionConfig("none"), modalities=discrete, fusion=own)
    return fv.VLM(config, experts=experts)


def chameleon() -> nn.Module:
    return Transformer(
        TransformerConfig(**SIZES, mixer="forge_vlm.families.chameleon:ChameleonAttention")
    )


TABLES: dict[str, tuple[Any, dict[str, str]]] = {
    "mixture": (
        mixture,
        ENDS | ATTENTION | NORMS | stacks("layers.0.feed_forward.experts")
        | {"layers.0.feed_forward.router.weight": "matrix", "layers.0.feed_forward.router.bias": "bias"}
        | {f"layers.0.feed_forward.shared.{n}_proj.weight": "matrix" for n in ("gate", "up", "down")}
        | {f"layers.0.feed_forward.shared.{n}_proj.bias": "bias" for n in ("gate", "up", "down")}
        | {"layers.0.feed_forward.shared.gate.weight": "matrix"},
    ),
    "vlm": (vlm, ENDS | ATTENTION | NORMS | FEED_FORWARD | VIT | ADAPTER),
    "cross attention": (
        cross,
        ENDS | ATTENTION | NORMS | FEED_FORWARD | VIT | ADAPTER
        | {n.replace("layers.0", "layers.cross_0"): k for n, k in (ATTENTION | NORMS | FEED_FORWARD).items()}
        | {f"layers.cross_0.mixer.{n}_norm.weight": "norm" for n in "qk"}
        | {f"layers.cross_0.{n}_gate": "vector" for n in ("mixer", "feed_forward")},
    ),
    "moma": (
        moma,
        ENDS | ATTENTION | NORMS
        | {f"layers.0.feed_forward.groups.{g}.router.weight": "matrix" for g in ("text", "image")}
        | stacks("layers.0.feed_forward.groups.text.experts") | stacks("layers.0.feed_forward.groups.image.experts"),
    ),
    "chameleon": (
        chameleon,
        ENDS | ATTENTION | NORMS | FEED_FORWARD
        | {f"layers.0.mixer.{n}_norm.weight": "stacked_norm" for n in "qk"}
        | {f"layers.0.mixer.{n}_norm.bias": "stacked_bias" for n in "qk"},
    ),
}  # fmt: skip
_MATRICES = ("matrix", "stacked_matrix", "embedding")


@pytest.mark.parametrize("name", TABLES)
def test_F146_kinds_decay_and_muon_of_a_model(name: str) -> None:
    build, table = TABLES[name]
    with torch.device("meta"):
        model = build()
    assert parameter_kinds(model) == table
    check_init_tables(model)
    blocks = (".0.", ".cross_0.")
    matrices = {n for n, kind in table.items() if kind in ("matrix", "stacked_matrix")}
    inside = {n for n in matrices if any(block in n for block in blocks)}
    assert hidden_matrices(model, OptimizerConfig("muon")) == inside
    model.to_empty(device="cpu")
    decays = {
        n: group["weight_decay"] > 0.0
        for group in build_optimizer(model).param_groups
        for n in group["param_names"]
    }
    assert decays == {n: k in _MATRICES for n, k in table.items()}


def test_F146_norms_of_heads_begin_as_norms() -> None:
    model = chameleon()
    norm = model.layers["0"].mixer.q_norm
    assert torch.equal(norm.weight, torch.ones(2, 4))
    assert torch.equal(norm.bias, torch.zeros(2, 4))


def test_F146_kinds_of_modules_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.chameleon.modeling_chameleon import ChameleonLayerNorm
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = transformers.GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=2)
    model = nn.ModuleDict({"norm": ChameleonLayerNorm((2, 4)), "experts": GptOssExperts(config)})
    assert parameter_kinds(model) == {
        "norm.weight": "stacked_norm",
        "norm.bias": "stacked_bias",
        "experts.gate_up_proj": "stacked_matrix",
        "experts.gate_up_proj_bias": "stacked_bias",
        "experts.down_proj": "stacked_matrix",
        "experts.down_proj_bias": "stacked_bias",
    }


@pytest.mark.parametrize("average", [None, 0.9])
def test_F146_a_checkpoint_of_muon_with_norms_of_heads_loads(
    tmp_path: Path, average: float | None
) -> None:
    """A version before trained the norms as matrices: their moments start anew, and the rest goes on."""
    config, names = OptimizerConfig("muon", ema=EMAConfig(average)), set(TABLES["chameleon"][1])
    model, stepped = chameleon(), chameleon()
    optimizer, saved = build_optimizer(model, config), build_optimizer(stepped, config)
    for parameter in stepped.parameters():
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    if average:
        saved.eval()
        optimizer.eval()
    old = {name: dict(slots) for name, slots in saved.named_state().items()}
    for head in "qk":
        slots = old[f"layers.0.mixer.{head}_norm.weight"]
        slots["momentum_buffer"] = slots.pop("exp_avg")
        del slots["exp_avg_sq"], slots["step"]
    with Store(tmp_path) as store:
        store.save(1, {"optimizer": old})
        assert store.load({"optimizer": NamedState.of(optimizer, model, names)}) == 1
    wanted, found = saved.named_state(), optimizer.named_state()
    for name, slots in found.items():
        fresh = name.endswith(("q_norm.weight", "k_norm.weight"))
        for slot, value in slots.items():
            anew = fresh and slot in ("exp_avg", "exp_avg_sq", "step")
            same = torch.zeros(()) if anew else wanted[name][slot]
            assert torch.equal(
                torch.as_tensor(value), torch.as_tensor(same).expand_as(torch.as_tensor(value))
            )


IMAGES = {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4}


def encoder(model_type: str, **keys: object) -> nn.Module:
    pytest.importorskip("transformers")
    own = {"model_type": model_type, "hidden_size": 8, "intermediate_size": 8, **keys}
    return vlm(vision=fv.VisionConfig("transformers", transformers=own))


def mllama() -> nn.Module:
    own = {
        "attention_heads": 2,
        "num_global_layers": 1,
        "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2]],
    }
    layers = {"intermediate_layers_indices": [0], "vision_output_dim": 16}
    return encoder("mllama_vision_model", **IMAGES, **own, **layers)


def patches() -> nn.Module:
    own = {
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": 8,
        "num_position_embeddings": 4,
        "deepstack_visual_indexes": [],
    }
    return encoder("qwen3_vl_vision", **own)


def sinks() -> nn.Module:
    own = {"attention": AttentionSpec(sinks=True), "norm": "rms_norm_plus_one"}
    return Transformer(TransformerConfig(**SIZES, **own))


def lagged() -> nn.Module:
    return MoE(
        MoEConfig(
            8, 8, 4, aux_loss_weight=0.1, aux_scope="global_batch_lagged", bias_update_rate=0.1
        )
    )


def adapters() -> nn.Module:
    model = Transformer(TransformerConfig(**SIZES))
    lora(model, LoRAConfig(rank=2))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: build for name, (build, _) in TABLES.items()},
    "clip": lambda: encoder("clip_vision_model", num_attention_heads=2, **IMAGES),
    **{build.__name__: build for build in (mllama, patches, sinks, lagged, adapters)},
}


def of_forge(modules: Iterator[nn.Module]) -> set[type]:
    """Classes of these, and those that they inherit from."""
    return {
        base for m in modules for base in type(m).__mro__ if base.__module__.startswith("forge_")
    }


@pytest.mark.parametrize("name", MODELS)
def test_F157_reset_parameters_fills_all_tensors(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    model.to_empty(device="cpu")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 2**31 - 7)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    left = [n for n, t in tensors.items() if t.isnan().any() or bool((t == 2**31 - 7).any())]
    assert not left


def test_F157_each_class_with_tensors_of_its_own_was_built() -> None:
    """By its text: a class that makes a parameter or a buffer is in one of the models above."""
    owners = set()
    for package in (forge_core, forge_moe, forge_vlm):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith(("__main__", "_kernel", "_triton_rows")):  # of Triton
                for own in vars(importlib.import_module(found.name)).values():
                    if (
                        isinstance(own, type)
                        and issubclass(own, nn.Module)
                        and own.__module__ == found.name
                    ):
                        text = inspect.getsource(own)
                        if (
                            "nn.Parameter(" in text
                            or "register_buffer(" in text
                            or "with_buffers(" in text
                        ):
                            owners.add(own)
    with torch.device("meta"):
        built = of_forge(m for build in MODELS.values() for m in build().modules())
    assert owners - built == set()

"""Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3 and GLM4-MoE: their expert blocks as Hugging Face stores them.

A row is (pattern there, pattern here, operations); `{i}` stands for the layer, `{e}` for an expert.
Operations come from a closed reversible set, here `("transpose", 0, 1)`, as a linear layer there is
(out, in) and an expert here (in, out), and `("stack_experts", E)`, as a file holds each expert apart.
Whoever moves tensors applies the rows; this file knows no storage. Rows of attention, norms and
dense layers come from elsewhere; these are the rest.

The rows are those of checkpoint files (`save_pretrained`, the hub). In memory transformers 5 packs
gate and up projection of all experts into one tensor; that form is not a file's and has no rows.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from forge_moe.config import MoEConfig
from forge_moe.families import keys

Row = tuple[str, str, tuple[tuple[Any, ...], ...]]


class BlockFamily(NamedTuple):
    """One family's expert block, both ways.

        config = MIXTRAL.config_from_hf(json.load(open("config.json")))   # -> MoEConfig
        rows = MIXTRAL.rows(config)                                       # of every sparse layer
        MIXTRAL.sparse_layers(hf)                                         # -> (0, 1, 2, ...)

    `config_to_hf(config)` gives the keys of `config.json` that speak of experts. Training options
    (auxiliary losses and their weights) are not read: they change no output, and Hugging Face
    defines them otherwise. Both ways raise ValueError with a line for each key that cannot be said
    on the other side, and for each that is unknown and may change the function.
    """

    name: str
    rows: Callable[[MoEConfig], tuple[Row, ...]]
    config_from_hf: Callable[[Mapping[str, Any]], MoEConfig]
    config_to_hf: Callable[[MoEConfig], dict[str, Any]]
    sparse_layers: Callable[[Mapping[str, Any]], tuple[int, ...]]


_HERE = "layers.{i}.feed_forward"


def _experts(config: MoEConfig, block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    ops = (("transpose", 0, 1), ("stack_experts", config.num_experts))
    pairs = {gate: "gate_proj", up: "up_proj", down: "down_proj"}
    return (
        (f"{block}.gate.weight", f"{_HERE}.router.weight", ()),
        *(
            (f"{block}.experts.{{e}}.{there}.weight", f"{_HERE}.experts.{here}", ops)
            for there, here in pairs.items()
        ),
    )


def _shared(block: str, name: str) -> tuple[Row, ...]:
    return tuple(
        (f"{block}.{name}.{part}.weight", f"{_HERE}.shared.{part}.weight", ())
        for part in ("gate_proj", "up_proj", "down_proj")
    )


_MLP = "model.layers.{i}.mlp"


def _mixtral_rows(config: MoEConfig) -> tuple[Row, ...]:
    return _experts(config, "model.layers.{i}.block_sparse_moe", "w1", "w3", "w2")


def _plain_rows(config: MoEConfig) -> tuple[Row, ...]:
    return _experts(config, _MLP, "gate_proj", "up_proj", "down_proj")


def _qwen2_rows(config: MoEConfig) -> tuple[Row, ...]:
    gate = (f"{_MLP}.shared_expert_gate.weight", f"{_HERE}.shared.gate.weight", ())
    return (*_plain_rows(config), *_shared(_MLP, "shared_expert"), gate)


def _deepseek_rows(config: MoEConfig) -> tuple[Row, ...]:
    bias = (f"{_MLP}.gate.e_score_correction_bias", f"{_HERE}.router.expert_bias", ())
    return (*_plain_rows(config), bias, *_shared(_MLP, "shared_experts"))


def _family(
    known: keys.Keys,
    rows: Callable[[MoEConfig], tuple[Row, ...]],
    sparse_layers: Callable[[Mapping[str, Any]], tuple[int, ...]],
) -> BlockFamily:
    return BlockFamily(known.model_type, rows, known.from_hf, known.to_hf, sparse_layers)


MIXTRAL = _family(keys.MIXTRAL, _mixtral_rows, keys.every_layer)
QWEN2_MOE = _family(keys.QWEN2_MOE, _qwen2_rows, keys.stepped_layers)
QWEN3_MOE = _family(keys.QWEN3_MOE, _plain_rows, keys.stepped_layers)
OLMOE = _family(keys.OLMOE, _plain_rows, keys.every_layer)
DEEPSEEK_V3 = _family(keys.DEEPSEEK_V3, _deepseek_rows, keys.later_layers)
GLM4_MOE = _family(keys.GLM4_MOE, _deepseek_rows, keys.later_layers)

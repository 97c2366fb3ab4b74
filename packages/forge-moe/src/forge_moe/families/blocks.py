"""Expert blocks of Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3, GLM4-MoE and gpt-oss, as Hugging Face has them.

A row is (Hugging Face pattern, Forge pattern, operations); `{i}` stands for the layer, `{e}` for an expert.
Operations come from a closed reversible set, here `("transpose", 0, 1)`, as a linear layer of Hugging Face
is (out, in) and an expert of Forge (in, out), and `("stack_experts", E)`, as a file stores each expert
separately. The code that reads checkpoints applies the rows. Rows of attention, norms and dense layers are
not here.

The rows are those of checkpoint files (`save_pretrained`, the hub). In memory transformers 5 packs gate and
up projection of all experts into one tensor; no file has that form.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from forge_moe._shared.problems import Problem, invalid, problems_of, raise_problems
from forge_moe.config import MoEConfig
from forge_moe.families import keys

Row = tuple[str, str, tuple[tuple[Any, ...], ...]]


class BlockFamily(NamedTuple):
    """The expert block of a family, in both directions.

        config = MIXTRAL.config_from_hf(json.load(open("config.json")))   # -> MoEConfig
        rows = MIXTRAL.rows_of(config)                                    # of every sparse layer
        MIXTRAL.sparse_layers(hf)                                         # -> (0, 1, 2, ...)

    `config_to_hf(config)` returns the keys of `config.json` about experts, `layers_to_hf(layers, num_layers)`
    those about which layers are mixtures. Training options (auxiliary
    losses and their weights) are not read: they change no output, and Hugging Face defines them
    differently. Both directions raise ValueError with a line for each key without an equivalent, and for
    each unknown one that may change the function.
    """

    name: str
    rows_of: Callable[[MoEConfig], tuple[Row, ...]]
    config_from_hf: Callable[[Mapping[str, Any]], MoEConfig]
    config_to_hf: Callable[[MoEConfig], dict[str, Any]]
    sparse_layers: Callable[[Mapping[str, Any]], tuple[int, ...]]
    layers_to_hf: Callable[[Sequence[int], int], dict[str, Any]]

    @property
    def rows(self) -> Callable[[MoEConfig], tuple[Row, ...]]:
        """`rows_of`, by its name of before."""
        return self.rows_of


class ExpertLayers(NamedTuple):
    """The mixtures of a model: the config of each, and the layers that have one, of `num_layers`."""

    config: MoEConfig
    layers: tuple[int, ...]
    num_layers: int

    def first_and_step(self) -> tuple[int, int]:
        """(first layer, step) of layers that are every n-th from a first one on; ValueError for others."""
        layers, count = self.layers, self.num_layers
        first = layers[0] if layers else count
        step = layers[1] - first if len(layers) > 1 else count
        if not layers or layers != tuple(range(first, count, step)):
            rule = "are the layers with mixtures, and must be every n-th from a first one on"
            fix = "use a model whose mlp_only_layers leave such a pattern"
            raise invalid("mlp_only_layers", "pattern", list(layers), rule, fix)
        return first, step


class LayersFamily(NamedTuple):
    """The mixtures of a family's models, as the entry point "experts" of `forge.hf_families` has them."""

    block: BlockFamily

    def config_from_hf(self, hf: Mapping[str, Any]) -> ExpertLayers:
        """The mixtures of a `config.json` as a dict."""
        config, layers = self.block.config_from_hf(hf), self.block.sparse_layers(hf)
        return ExpertLayers(config, layers, len(keys.every_layer(hf)))

    def config_to_hf(self, found: ExpertLayers) -> dict[str, Any]:
        """All keys about experts; ValueError with a problem for each option that the family cannot hold."""
        written: dict[str, Any] = {}
        problems: list[Problem] = []
        for part in (
            lambda: self.block.config_to_hf(found.config),
            lambda: self.block.layers_to_hf(found.layers, found.num_layers),
        ):
            try:
                written |= part()
            except ValueError as error:
                problems += problems_of(error)
        raise_problems(self.block.name, problems)
        return written

    def rows_of(self, found: ExpertLayers) -> tuple[Row, ...]:
        """The rows of all mixtures."""
        return self.block.rows_of(found.config)


_FORGE = "layers.{i}.feed_forward"
_HF = "model.layers.{i}.mlp"


def _experts(config: MoEConfig, block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    ops = (("transpose", 0, 1), ("stack_experts", config.num_experts))
    names = {gate: "gate_proj", up: "up_proj", down: "down_proj"}
    return (
        (f"{block}.gate.weight", f"{_FORGE}.router.weight", ()),
        *(
            (f"{block}.experts.{{e}}.{hf}.weight", f"{_FORGE}.experts.{forge}", ops)
            for hf, forge in names.items()
        ),
    )


def _shared(name: str) -> tuple[Row, ...]:
    return tuple(
        (f"{_HF}.{name}.{part}.weight", f"{_FORGE}.shared.{part}.weight", ())
        for part in ("gate_proj", "up_proj", "down_proj")
    )


def _mixtral_rows(config: MoEConfig) -> tuple[Row, ...]:
    return _experts(config, "model.layers.{i}.block_sparse_moe", "w1", "w3", "w2")


def _plain_rows(config: MoEConfig) -> tuple[Row, ...]:
    return _experts(config, _HF, "gate_proj", "up_proj", "down_proj")


def _qwen2_rows(config: MoEConfig) -> tuple[Row, ...]:
    gate = (f"{_HF}.shared_expert_gate.weight", f"{_FORGE}.shared.gate.weight", ())
    return (*_plain_rows(config), *_shared("shared_expert"), gate)


def _deepseek_rows(config: MoEConfig) -> tuple[Row, ...]:
    bias = (f"{_HF}.gate.e_score_correction_bias", f"{_FORGE}.router.expert_bias", ())
    return (*_plain_rows(config), bias, *_shared("shared_experts"))


def _gpt_oss_rows(config: MoEConfig) -> tuple[Row, ...]:
    """Names alone: a file of it has stacks of experts, (in, out), gate and up in turns."""
    matrices = ("router.weight", "experts.gate_up_proj", "experts.down_proj")
    biases = ("router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias")
    return tuple((f"{_HF}.{name}", f"{_FORGE}.{name}", ()) for name in (*matrices, *biases))


def _family(
    hf: keys.ConfigKeys,
    rows: Callable[[MoEConfig], tuple[Row, ...]],
    sparse_layers: Callable[[Mapping[str, Any]], tuple[int, ...]],
    layers_to_hf: Callable[[str, Sequence[int], int], dict[str, Any]],
) -> BlockFamily:
    name = hf.model_type
    written = partial(layers_to_hf, name)
    return BlockFamily(name, rows, hf.from_hf, hf.to_hf, sparse_layers, written)


_EVERY = (keys.every_layer, keys.every_layer_to_hf)
_STEPPED = (keys.stepped_layers, keys.stepped_layers_to_hf)
_LATER = (keys.later_layers, keys.later_layers_to_hf)
MIXTRAL = _family(keys.MIXTRAL, _mixtral_rows, *_EVERY)
QWEN2_MOE = _family(keys.QWEN2_MOE, _qwen2_rows, *_STEPPED)
QWEN3_MOE = _family(keys.QWEN3_MOE, _plain_rows, *_STEPPED)
OLMOE = _family(keys.OLMOE, _plain_rows, *_EVERY)
DEEPSEEK_V3 = _family(keys.DEEPSEEK_V3, _deepseek_rows, *_LATER)
GLM4_MOE = _family(keys.GLM4_MOE, _deepseek_rows, *_LATER)
GPT_OSS = _family(keys.GPT_OSS, _gpt_oss_rows, *_EVERY)

"""Parts of a transformer by the names in its config.

A part of your own is an entry point of the kind's group or an import path `module:attr`, and is called as

    mixer                 part(config.of_layer(layer), layer, **options) layer counts from 0
    feed_forward          part(config, layer, **options)
    norm                  part(dim, eps, **options)
    block                 part(config, mixer, feed_forward, **options)   both are modules
    rope_scaling          part(frequencies, scaling, **options)          see `inverse_frequencies`
    attention.mask        part(ctx, queries, keys)                       see `AttentionSpec`

with the options of `config.mixer_options` and so on, which its signature must have. Its config is that of the
standard parametrization (`config.as_standard()`), which has the factors of any other one as scales.
"""

from torch import nn

from forge_core._shared.problems import Problem, problems_of, raise_problems
from forge_core.model.attention import Attention
from forge_core.model.block import Block, PostNormBlock, SandwichBlock
from forge_core.model.config import TransformerConfig
from forge_core.model.feed_forward import FEED_FORWARDS
from forge_core.model.mla import LatentAttention
from forge_core.model.norm import NORMS
from forge_core.model.rope import ROPE_SCALINGS
from forge_core.model.spec import MASKS
from forge_core.registry import Registry

MIXERS = Registry(
    "model.mixer",
    "forge.mixers",
    ("config", "layer"),
    {
        "attention": lambda config, layer: Attention(config),
        "mla": lambda config, layer: LatentAttention(config),
    },
)
BLOCKS = Registry(
    "model.block",
    "forge.blocks",
    ("config", "mixer", "feed_forward"),
    {"pre_norm": Block, "post_norm": PostNormBlock, "sandwich": SandwichBlock},
)


def build_mixer(config: TransformerConfig, layer: int) -> nn.Module:
    """The token mixer of a layer, counted from 0, that a config names; its config is that of the layer."""
    build = MIXERS.find(config.mixer)
    own = config.as_standard().of_layer(layer)
    mixer: nn.Module = build(own, layer, **config.mixer_options)
    return mixer


def build_block(config: TransformerConfig, mixer: nn.Module, feed_forward: nn.Module) -> nn.Module:
    """The block around two sublayers that a config names."""
    builder = BLOCKS.find(config.block)
    block: nn.Module = builder(config.as_standard(), mixer, feed_forward, **config.block_options)
    return block


def check_parts(config: TransformerConfig) -> None:
    """ValueError that lists each name that leads nowhere and each option that a part does not take or lacks.

    Parts are imported and their signatures read; none is called.
    """
    named = [
        (MIXERS, config.mixer, config.mixer_options),
        (NORMS, config.norm, config.norm_options),
        (FEED_FORWARDS, config.feed_forward, config.feed_forward_options),
        (BLOCKS, config.block, config.block_options),
    ]
    if config.attention.mask != "causal":
        named.append((MASKS, config.attention.mask, {}))
    if config.rope_scaling is not None:
        named.append((ROPE_SCALINGS, config.rope_scaling.name, config.rope_scaling.options))

    problems: list[Problem] = []
    for registry, name, options in named:
        try:
            registry.checked(name, options)
        except ValueError as error:
            problems += problems_of(error)
    raise_problems("", problems)

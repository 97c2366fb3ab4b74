"""One family of Hugging Face models: rows that map its tensors to Forge's, and functions that translate its config.

A row is (pattern of Hugging Face's names, pattern of Forge's names, operations); `{i}` stands for the layer. Operations
come from a closed reversible set: `("transpose", d0, d1)`, `("concat", dim, n)`, `("split", dim, n)`,
`("stack_experts", n)`, `("rope_permute", heads)`. Most rows only rename: Forge has Hugging Face's half-rotation layout of
rotary embeddings. The rows are data; forge-ckpt applies them to checkpoints. Rows of biases apply only to checkpoints that
have these biases.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from forge_core.model.config import TransformerConfig

Row = tuple[str, str | tuple[str, ...], tuple[tuple[Any, ...], ...]]


class Family(NamedTuple):
    """One family: rows for its tensors, and functions that translate its configuration both ways.

    LLAMA.config_from_hf(json.load(open("config.json")))   # -> TransformerConfig
    """

    name: str
    rows: tuple[Row, ...]
    config_from_hf: Callable[[Mapping[str, Any]], TransformerConfig]
    #: As `config_to_hf`, for a config in the standard parametrization.
    standard_to_hf: Callable[[TransformerConfig], dict[str, Any]]
    #: Further rows, whose operations have sizes of the config.
    sized_rows: Callable[[TransformerConfig], tuple[Row, ...]] = lambda config: ()
    #: Patterns of tensors in its folders that are passed through unchanged, as those of an image tokenizer.
    beside: tuple[str, ...] = ()

    def config_to_hf(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the keys of `config.json`; ValueError with a line for each option that the family cannot express."""
        return self.standard_to_hf(config.as_standard())

    def rows_of(self, config: TransformerConfig) -> tuple[Row, ...]:
        """Return all rows of a model: those of the family, and those with sizes of its config."""
        return self.rows + self.sized_rows(config)


def layer_rows(hf: str, forge: str, *, bias: bool = False) -> tuple[Row, ...]:
    """Rows that rename one module of every layer."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(
        (f"model.layers.{{i}}.{hf}.{kind}", f"layers.{{i}}.{forge}.{kind}", ()) for kind in kinds
    )


def attention_rows(*, o_bias: bool) -> tuple[Row, ...]:
    """Rows of the four projections of an attention, those of biases included."""
    return tuple(
        row
        for n in "qkvo"
        for row in layer_rows(f"self_attn.{n}_proj", f"mixer.{n}_proj", bias=n != "o" or o_bias)
    )


def feed_forward_rows(*, bias: bool = False) -> tuple[Row, ...]:
    """Rows of a gated feed-forward."""
    names = ("gate_proj", "up_proj", "down_proj")
    return tuple(
        row for n in names for row in layer_rows(f"mlp.{n}", f"feed_forward.{n}", bias=bias)
    )


def sublayers(*, o_bias: bool, feed_forward_bias: bool) -> tuple[Row, ...]:
    """Rows of an attention and a gated feed-forward."""
    return attention_rows(o_bias=o_bias) + feed_forward_rows(bias=feed_forward_bias)


OUTSIDE_LAYERS: tuple[Row, ...] = (
    ("model.embed_tokens.weight", "embedding.weight", ()),
    ("model.norm.weight", "norm.weight", ()),
    ("lm_head.weight", "lm_head.weight", ()),
)
NORMS: tuple[Row, ...] = (
    *layer_rows("input_layernorm", "mixer_norm"),
    *layer_rows("post_attention_layernorm", "feed_forward_norm"),
)
QK_NORMS: tuple[Row, ...] = (
    *layer_rows("self_attn.q_norm", "mixer.q_norm"),
    *layer_rows("self_attn.k_norm", "mixer.k_norm"),
)

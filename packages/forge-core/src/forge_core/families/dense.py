"""Llama 3, Mistral, Qwen2/2.5 and Qwen3 (dense) as Hugging Face stores them.

A row is (pattern of Hugging Face's names, pattern of Forge's names, operations); `{i}` stands for the layer.
Operations come from a closed reversible set: `("transpose", d0, d1)`, `("concat", dim, n)`,
`("split", dim, n)`, `("stack_experts", n)`, `("rope_permute", heads)`. Rows of these families have no operations, they only rename:
Forge has Hugging Face's half-rotation layout of rotary embeddings. The rows are data; the code that reads and
writes checkpoints applies them. Rows of biases apply only to checkpoints that have these biases.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from forge_core._config import is_size
from forge_core._shared.problems import invalid
from forge_core.families.keys import read_common, write_common
from forge_core.families.layers import (
    FULL,
    SLIDING,
    local_options,
    names_of,
    sliding_to_hf,
)
from forge_core.model.config import TransformerConfig
from forge_core.model.spec import AttentionSpec

Row = tuple[str, str | tuple[str, ...], tuple[tuple[Any, ...], ...]]


class Family(NamedTuple):
    """One family: rows for its tensors, and functions that translate its configuration both ways.

    LLAMA.config_from_hf(json.load(open("config.json")))   # -> TransformerConfig
    """

    name: str
    rows: tuple[Row, ...]
    config_from_hf: Callable[[Mapping[str, Any]], TransformerConfig]
    #: Of a config in the standard parametrization: `config_to_hf` without that condition.
    standard_to_hf: Callable[[TransformerConfig], dict[str, Any]]
    #: Further rows, whose operations have sizes of the config.
    sized_rows: Callable[[TransformerConfig], tuple[Row, ...]] = lambda config: ()
    #: Patterns of tensors in its folders that are no part of the model (a tokeniser of images), and go back into them.
    beside: tuple[str, ...] = ()

    def config_to_hf(self, config: TransformerConfig) -> dict[str, Any]:
        """The keys of `config.json`; ValueError with a line for each option that the family cannot hold."""
        return self.standard_to_hf(config.as_standard())

    def rows_of(self, config: TransformerConfig) -> tuple[Row, ...]:
        """All rows of a model: those of the family, and those with sizes of its config."""
        return self.rows + self.sized_rows(config)


def layer_rows(hf: str, forge: str, *, bias: bool = False) -> tuple[Row, ...]:
    """Rows that rename one module of every layer."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(
        (f"model.layers.{{i}}.{hf}.{kind}", f"layers.{{i}}.{forge}.{kind}", ()) for kind in kinds
    )


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


def sublayers(*, o_bias: bool, feed_forward_bias: bool) -> tuple[Row, ...]:
    return (
        *layer_rows("self_attn.q_proj", "mixer.q_proj", bias=True),
        *layer_rows("self_attn.k_proj", "mixer.k_proj", bias=True),
        *layer_rows("self_attn.v_proj", "mixer.v_proj", bias=True),
        *layer_rows("self_attn.o_proj", "mixer.o_proj", bias=o_bias),
        *feed_forward_rows(bias=feed_forward_bias),
    )


def feed_forward_rows(*, bias: bool = False) -> tuple[Row, ...]:
    names = ("gate_proj", "up_proj", "down_proj")
    return tuple(
        row for n in names for row in layer_rows(f"mlp.{n}", f"feed_forward.{n}", bias=bias)
    )


_QWEN_WINDOW = ("sliding_window", "max_window_layers")


def _qwen_from_hf(
    hf: Mapping[str, Any], model_type: str, reads: tuple[str, ...] = (), **options: Any
) -> TransformerConfig:
    """Qwen reads its window only if `use_sliding_window` is true, in the layers from `max_window_layers` on."""

    def windows() -> dict[str, Any]:
        window, first = hf.get("sliding_window", 4096), hf.get("max_window_layers", 28)
        if not hf.get("use_sliding_window"):
            return {}
        if not isinstance(first, int):
            key, rule = "max_window_layers", "must be a whole number"
            raise invalid(key, "type", first, rule, "correct it", where=model_type)
        layers = range(hf["num_hidden_layers"])
        default = [FULL if window is None or i < first else SLIDING for i in layers]
        names = names_of(hf, model_type, default)
        return local_options(hf, model_type, names, window)

    sliding = hf.get("use_sliding_window") is True
    reads = (*reads, *_QWEN_WINDOW)
    return read_common(hf, model_type, reads, sliding=sliding, after=windows, **options)


def _qwen_to_hf(
    config: TransformerConfig, model_type: str, architecture: str, fixed: dict[str, Any]
) -> dict[str, Any]:
    windows = sliding_to_hf(config, model_type)
    fixed = {**fixed, "layer_pattern": config.layer_pattern}
    hf = write_common(config, model_type, architecture, fixed, ("window",))
    if windows["sliding_window"] is None:
        return {**hf, "use_sliding_window": False}
    first = windows["layer_types"].index(SLIDING)
    return {**hf, **windows, "use_sliding_window": True, "max_window_layers": first}


def _llama_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    bias = bool(hf.get("attention_bias", False))
    return read_common(
        hf,
        "llama",
        ("attention_bias", "mlp_bias"),
        qkv_bias=bias,
        o_bias=bias,
        feed_forward_bias=bool(hf.get("mlp_bias", False)),
    )


def _llama_to_hf(config: TransformerConfig) -> dict[str, Any]:
    fixed = {"qk_norm": False, "o_bias": config.qkv_bias}
    return {
        **write_common(config, "llama", "LlamaForCausalLM", fixed),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.feed_forward_bias,
    }


def _qwen2_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    return _qwen_from_hf(hf, "qwen2", qkv_bias=True)


def _qwen2_to_hf(config: TransformerConfig) -> dict[str, Any]:
    fixed = {"qk_norm": False, "qkv_bias": True, "o_bias": False, "feed_forward_bias": False}
    return _qwen_to_hf(config, "qwen2", "Qwen2ForCausalLM", fixed)


def _qwen3_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    bias = bool(hf.get("attention_bias", False))
    # Qwen3's default of head_dim is 128 at every width, not dim / num_heads.
    given, reads = {"head_dim": 128, **hf}, ("attention_bias",)
    return _qwen_from_hf(given, "qwen3", reads, qk_norm=True, qkv_bias=bias, o_bias=bias)


def _qwen3_to_hf(config: TransformerConfig) -> dict[str, Any]:
    fixed = {"qk_norm": True, "o_bias": config.qkv_bias, "feed_forward_bias": False}
    hf = _qwen_to_hf(config, "qwen3", "Qwen3ForCausalLM", fixed)
    return {**hf, "attention_bias": config.qkv_bias}


def _mistral_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    window = hf.get("sliding_window", 4096)  # transformers' default where the key is missing
    if hf.get("layer_types"):  # AutoConfig reads such a file as Ministral: full layers have none
        window = None
    # null, or a window longer than any row: full attention. `read_common` refuses values of another kind.
    spec = AttentionSpec(window=window if is_size(window, 2**31) else None)
    return read_common(hf, "mistral", ("sliding_window",), attention=spec)


def _mistral_to_hf(config: TransformerConfig) -> dict[str, Any]:
    biases = ("qkv_bias", "o_bias", "feed_forward_bias")
    fixed = {"qk_norm": False, **dict.fromkeys(biases, False)}
    hf = write_common(config, "mistral", "MistralForCausalLM", fixed, ("window",))
    return {**hf, "sliding_window": config.attention.window}


LLAMA = Family(
    "llama",
    OUTSIDE_LAYERS + NORMS + sublayers(o_bias=True, feed_forward_bias=True),
    _llama_from_hf,
    _llama_to_hf,
)
MISTRAL = Family(
    "mistral",
    OUTSIDE_LAYERS + NORMS + sublayers(o_bias=False, feed_forward_bias=False),
    _mistral_from_hf,
    _mistral_to_hf,
)
QWEN2 = Family(
    "qwen2",
    OUTSIDE_LAYERS + NORMS + sublayers(o_bias=False, feed_forward_bias=False),
    _qwen2_from_hf,
    _qwen2_to_hf,
)
QWEN3 = Family(
    "qwen3",
    OUTSIDE_LAYERS + NORMS + QK_NORMS + sublayers(o_bias=True, feed_forward_bias=False),
    _qwen3_from_hf,
    _qwen3_to_hf,
)

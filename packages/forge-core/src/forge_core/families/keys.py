"""Keys of a Hugging Face `config.json` that the families share, and how each family spells its own."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from forge_core._config import is_finite, is_size
from forge_core._shared.hf_keys import HARMLESS, TRAINING, is_rate
from forge_core._shared.problems import Problem, raise_problems
from forge_core.families.rope_keys import (
    ROPE_KEYS,
    ROPE_NUMBERS,
    ROPE_SIZE,
    TABLES,
    read_scaling,
    rope_problems,
    rope_table,
    scaling_to_hf,
    table_entries,
)
from forge_core.model.config import TransformerConfig
from forge_core.model.rope import ROPE_NAMES

#: Keys without a default, and the fields of TransformerConfig with the same value.
_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_seq_len",
}
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")
_LATENT_SIZES = (
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "qk_head_dim",
)
_LAYER_SIZES = (
    *("sliding_window", "sliding_window_pattern", "_sliding_window_pattern"),
    "no_rope_layer_interval",
)
_NUMBERS = ("rms_norm_eps", "initializer_range", "rope_theta", "partial_rotary_factor")
_FACTORS = (
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    *("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"),
    "rope_local_base_freq",
)
_SWITCHES = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "use_qk_norm"),
    *("use_bidirectional_attention", "use_sliding_window", "truncate", "rope_interleave"),
)
_NAMES = " or ".join(map(repr, ROPE_NAMES))
_ANOTHER = "choose another family"
_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        (*_REQUIRED, *_OPTIONAL_SIZES, *_LATENT_SIZES, *_LAYER_SIZES, ROPE_SIZE),
        lambda value: is_size(value, 2**62),
        "a whole number, at least 1",
    ),
    ((*_NUMBERS, *ROPE_NUMBERS), is_finite, "a finite number"),
    (_FACTORS, lambda value: is_finite(value) and value > 0.0, "a finite number above 0"),
    (
        ("no_rope_layers",),
        lambda value: isinstance(value, list) and all(turn in (0, 1) for turn in value),
        "a list of 0 and 1",
    ),
    (tuple(TRAINING), is_rate, "a finite number, at least 0"),
    (_SWITCHES, lambda value: isinstance(value, bool), "true or false"),
    (
        ("layer_types",),
        lambda value: isinstance(value, list) and all(isinstance(kind, str) for kind in value),
        "a list of names",
    ),
    (("rope_type", "type"), lambda value: isinstance(value, str), "a name"),
    (TABLES, lambda value: isinstance(value, Mapping), "a table"),
)
_READ = {
    *(*_REQUIRED, *_OPTIONAL_SIZES, *_NUMBERS),
    *("model_type", "hidden_act", "tie_word_embeddings", "use_sliding_window", "layer_types"),
    *TABLES,
}

# Switches of other models that files of these families carry, off.
_OFF = ("rope_interleaved", "use_mrope")
#: Fields that are False in a family unless it says otherwise.
_PLAIN = dict.fromkeys(("qk_norm", "qkv_bias", "o_bias", "feed_forward_bias"), False)


class Spelling(NamedTuple):
    """The keys and values by which a family writes a TransformerConfig; reads and writes the keys that all share."""

    model_type: str
    #: Name of the class in transformers.
    architecture: str
    #: Fields of TransformerConfig with one value in the family; `_PLAIN` has others.
    fixed: Mapping[str, Any] = {}
    #: Switches of the file, and the fields that each sets.
    switches: Mapping[str, tuple[str, ...]] = {}
    #: Values of transformers for keys that a file leaves out.
    defaults: Mapping[str, Any] = {}
    #: Further keys that the family reads itself.
    reads: tuple[str, ...] = ()
    #: Whether heads may rotate only a part of their dims, and whether the family reads windows of layers itself.
    partial_rotary: bool = False
    sliding: bool = False

    def read(
        self,
        hf: Mapping[str, Any],
        after: Callable[[], dict[str, Any]] = dict,
        **options: Any,
    ) -> TransformerConfig:
        """Return the TransformerConfig of a `config.json` as a dict; `options` are fields that the family reads itself.

        Rotary keys are read in the form of transformers 4 (`rope_theta`, `rope_scaling`) and of 5 (`rope_parameters`).
        `after` returns further options once all values are known to be sound. Raises ValueError with one line for each
        key that is missing, holds no sound number, sets an option that Forge's transformer does not have, or is unknown:
        an unknown key may change what the model computes.
        """
        hf = {**self.defaults, **hf}
        problems = [
            Problem(key, "missing", ..., "is missing", "give a complete config.json")
            for key in _REQUIRED
            if key not in hf
        ]
        wrong = _wrong_kinds(hf)
        problems += wrong + _unknown(hf, (*self.reads, *self.switches))
        latent = self.fixed.get("mixer") == "mla"
        if not wrong:
            problems += _unsupported(hf, self.model_type, self.sliding)
            problems += rope_problems(hf, self.partial_rotary, latent)
        raise_problems(self.model_type, problems)

        rope = rope_table(hf)
        switched = {
            field: bool(hf.get(key, False))
            for key, fields in self.switches.items()
            for field in fields
        }
        own = {**self.fixed, **switched, **options, **after()}

        return TransformerConfig(
            **{field: hf[key] for key, field in _REQUIRED.items()},
            num_kv_heads=hf.get("num_key_value_heads"),
            head_dim=_head_dim(hf),
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope["rope_theta"]),
            rope_scaling=read_scaling(rope, latent),
            partial_rotary_factor=float(rope["partial_rotary_factor"]),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            init_std=hf.get("initializer_range", 0.02),
            **own,
        )

    def write(
        self, config: TransformerConfig, spec: tuple[str, ...] = (), **options: Any
    ) -> dict[str, Any]:
        """Return the keys of `config.json` that families share, and the family's switches.

        Rotary keys are written in the forms of transformers 4 and 5. `spec` are the fields of AttentionSpec that the
        family writes itself, `options` fields of the config and the values that it requires of them. Raises ValueError
        with a line for each field whose value the family cannot express.
        """
        switched = {
            field: getattr(config, fields[0])
            for fields in self.switches.values()
            for field in fields
        }
        expected = {
            **{"mixer": "attention", "block": "pre_norm", "norm": "rms_norm"},
            **{"feed_forward": "swiglu", "qk_norm_over": "head", "layer_pattern": ()},
            **{"partial_rotary_factor": 1.0, "embedding_scale": 1.0, "residual_scale": 1.0},
            **{"logits_scale": 1.0, "logits_softcap": None},
            **_PLAIN,
            **self.fixed,
            **switched,
            **options,
        }

        problems = [
            Problem(name, "family", own, f"must be {value!r} in this family", _ANOTHER)
            for name, value in expected.items()
            if (own := getattr(config, name)) != value
        ]
        problems += [
            Problem(f"attention.{name}", "no_key", value, "has no key in this family", _ANOTHER)
            for name, value in config.attention.beyond(spec).items()
        ]
        if config.rope_scaling is not None and config.rope_scaling.name not in ROPE_NAMES:
            name, rule = config.rope_scaling.name, f"must be {_NAMES} in this family"
            problems.append(Problem("rope_scaling.name", "unknown", name, rule, "choose one"))
        raise_problems(self.model_type, problems)

        scaling = scaling_to_hf(config.rope_scaling)
        rope = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}

        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{key: getattr(config, field) for key, field in _REQUIRED.items()},
            "intermediate_size": config.resolved_hidden_dim,
            "num_key_value_heads": config.resolved_num_kv_heads,
            "head_dim": config.resolved_head_dim,
            "hidden_act": "silu",
            "initializer_range": config.init_std,
            "rms_norm_eps": config.norm_eps,
            "tie_word_embeddings": config.tie_embeddings,
            "rope_theta": config.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": rope,
            **{key: getattr(config, fields[0]) for key, fields in self.switches.items()},
        }


def given_values(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file that are not null, for families in which null stands for the default."""
    return {key: value for key, value in hf.items() if value is not None}


def _head_dim(hf: Mapping[str, Any]) -> int | None:
    """None for heads of hidden_size / num_heads: a default that the file writes out gives the same config."""
    given: int | None = hf.get("head_dim")
    usual = given is not None and given * hf["num_attention_heads"] == hf["hidden_size"]
    return None if usual else given


def _wrong_kinds(hf: Mapping[str, Any]) -> list[Problem]:
    """Values of the wrong kind for their key; null stands for the default where there is one."""
    return [
        Problem(name, "type", value, f"must be {rule}", "correct it")
        for name, value in {**hf, **table_entries(hf)}.items()
        for keys, sound, rule in _KINDS
        if name.rpartition(".")[2] in keys
        and not sound(value)
        and (value is not None or name in _REQUIRED)
    ]


def _unknown(hf: Mapping[str, Any], reads: tuple[str, ...]) -> list[Problem]:
    """Keys that the family does not read and that are not known to be harmless."""
    known = _READ | HARMLESS | TRAINING | set(reads) | {key for key in _OFF if hf.get(key) is False}
    given = {key: value for key, value in hf.items() if key not in known}
    rope = table_entries(hf).items()
    given.update((name, value) for name, value in rope if name.rpartition(".")[2] not in ROPE_KEYS)
    rule, fix = "is unknown and may change what the model computes", "remove it if it does not"
    given = {name: value for name, value in given.items() if value is not None}
    return [Problem(name, "unknown_key", value, rule, fix) for name, value in given.items()]


def _unsupported(hf: Mapping[str, Any], model_type: str, sliding: bool) -> list[Problem]:
    """Settings outside rotary embedding that Forge's transformer does not support."""
    layer_types = {kind for kind in hf.get("layer_types") or () if kind != "full_attention"}
    broken = {
        "model_type": hf.get("model_type", model_type) != model_type,
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(hf.get("use_sliding_window", False)) and not sliding,
        "layer_types": bool(layer_types) and not sliding,
    }
    found = {key: hf.get(key) for key in broken if broken[key]}
    if "layer_types" in found:
        found["layer_types"] = sorted(layer_types)
    fix = f"use a {model_type} model with silu and full attention"
    return [Problem(k, "unsupported", v, "is not supported", fix) for k, v in found.items()]

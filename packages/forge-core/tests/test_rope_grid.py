"""Rotary tables and rotated heads over a grid of settings: those of transformers, or a key is rejected.

S = 6 positions, D = width of a head. Both sides compute in fp32, in another order of operations.
"""

from itertools import product
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from forge_core.families import FAMILIES
from forge_core.model import Attention, TokenContext
from forge_core.model.rope import attention_factor, inverse_frequencies, rotate, score_factor
from forge_testing.problems import rejects

transformers = pytest.importorskip("transformers")
llama = pytest.importorskip("transformers.models.llama.modeling_llama")
glm = pytest.importorskip("transformers.models.glm4_moe.modeling_glm4_moe")
deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")

THETAS = (1e4, 5e5, 5e6)
YARN = {"factor": 40.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
#: Further keys of YaRN, each at values that transformers reads in its own way.
YARN_KEYS: tuple[dict[str, Any], ...] = (
    {},
    {"mscale": 1.0},
    {"mscale_all_dim": 1.0},
    {"mscale": 1.0, "mscale_all_dim": 1.0},
    {"mscale": 0.707, "mscale_all_dim": 1.0},
    {"mscale": 0.0, "mscale_all_dim": 1.0},
    {"mscale": 1.0, "mscale_all_dim": 0.0},
    {"attention_factor": 1.3},
    {"attention_factor": 1.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"attention_factor": 0.0},
    {"mscale": -1.0, "mscale_all_dim": 1.0},
    {"beta_fast": 0.0},
    {"beta_slow": 0.0},
    {"beta_fast": None, "beta_slow": None},
    {"factor": None},
    {"factor": 0.5},
    {"attention_factor": None, "mscale": None},
)


class Setting(NamedTuple):
    """A family, the width of its heads, `rope_parameters` and `max_position_embeddings`."""

    family: str
    head_dim: int
    rope: dict[str, Any]
    length: int

    def hf(self) -> dict[str, Any]:
        return {
            **{"model_type": self.family, "vocab_size": 32, "hidden_size": 2 * self.head_dim},
            **{"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"num_key_value_heads": 2, "head_dim": self.head_dim, "rope_parameters": self.rope},
            "max_position_embeddings": self.length,
        }


def table(name: str, theta: float, **keys: Any) -> dict[str, Any]:
    return {"rope_type": name, "rope_theta": theta, **keys}


def grid() -> list[Setting]:
    """1,908 settings of default, linear, llama3 and yarn."""
    found = []
    widths, factors, lengths = (8, 16, 64, 128), (1.0, 4.0, 40.0, 64.0), (16, 64, 4096, 8192)
    betas = ((32.0, 1.0), (1.0, 1.0), (1.0, 32.0), (4.0, 2.0))
    for width, theta, factor, length, (fast, slow), truncate in product(
        widths, THETAS, factors, lengths, betas, (True, False)
    ):
        keys = {"factor": factor, "original_max_position_embeddings": length, "truncate": truncate}
        rope = table("yarn", theta, beta_fast=fast, beta_slow=slow, **keys)
        found.append(Setting("llama", width, rope, int(length * factor)))

    # as long as the original context, and stretched
    for keys, length, width in product(YARN_KEYS, (4096, 163840), (2, 4, 64)):
        found.append(Setting("llama", width, table("yarn", 1e4, **{**YARN, **keys}), length))
    for factor, low, high, length, theta, width in product(
        (1.0, 8.0, 32.0), (1.0, 2.0), (4.0, 2.0, 1.0), (16, 8192), (1e4, 5e5), (8, 128)
    ):
        keys = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
        rope = table("llama3", theta, original_max_position_embeddings=length, **keys)
        found.append(Setting("llama", width, rope, length))
    for factor, theta, width in product((1.0, 2.0, 64.0), (1e4, 5e6), (2, 8, 128)):
        found.append(Setting("llama", width, table("linear", theta, factor=factor), 64))

    for theta, width in product(THETAS, (2, 8, 64, 128)):
        found.append(Setting("llama", width, table("default", theta), 64))
    scalings = (
        ("default", {}),
        ("linear", {"factor": 4.0}),
        ("llama3", {**LLAMA3, "original_max_position_embeddings": 64}),
        ("yarn", {**YARN, "beta_fast": 4.0}),
    )
    # part of each head; an odd number of dims is rejected
    for (name, keys), theta, width, partial in product(
        scalings, (1e4, 5e6), (8, 10, 128), (0.25, 0.5, 0.75, 1.0)
    ):
        rope = table(name, theta, partial_rotary_factor=partial, **keys)
        found.append(Setting("glm4_moe", width, rope, 4096))
    return found


def rejected(setting: Setting) -> tuple[str, Any, str] | None:
    """Key, value and code of the problem of a setting that Forge does not have."""
    rope, found = setting.rope, None
    turned = int(setting.head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope["rope_type"] == "yarn":
        # transformers reads null and 0 as its default
        fast, slow = rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0
        growths = [key for key in ("mscale", "attention_factor") if (rope.get(key) or 0.0) < 0.0]
        if rope["factor"] is None:
            found = ("rope_type", "yarn", "requires")
        elif rope.get("attention_factor") == 0.0:
            found = ("attention_factor", 0.0, "range")
        elif growths:
            found = (growths[0], rope[growths[0]], "range")
        elif slow > fast:
            found = ("beta_slow", slow, "range")
    if rope["rope_type"] == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        found = ("low_freq_factor", rope["low_freq_factor"], "range")
    if (rope.get("factor") or 1.0) < 1.0:
        found = ("factor", rope["factor"], "range")
    if turned % 2:
        found = ("partial_rotary_factor", rope["partial_rotary_factor"], "even")
    return found


def theirs(setting: Setting) -> Any:
    """transformers' module of rotary tables."""
    config = transformers.AutoConfig.for_model(**setting.hf())
    if setting.family == "llama":
        return llama.LlamaRotaryEmbedding(config)
    return glm.Glm4MoeRotaryEmbedding(config)


def compare(settings: list[Setting]) -> None:
    """Each setting has transformers' frequencies, tables and rotated heads, or is rejected."""
    counts = {"equal": 0, "rejected": 0}
    for setting in settings:
        family, hf = FAMILIES[setting.family], setting.hf()
        if (problem := rejected(setting)) is not None:
            with rejects(*problem):
                family.config_from_hf(hf)
            counts["rejected"] += 1
            continue
        config, reference = family.config_from_hf(hf), theirs(setting)
        wanted = reference.inv_freq  # (D / 2,)
        found = inverse_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
        # In fp32 transformers' blend of a pair that is slowed down 64 times has errors of 1 - 63 / 64.
        rounding = 1e-6 if setting.rope.get("truncate", True) else 2e-5
        assert found.shape == wanted.shape, setting
        assert ((found - wanted).abs() <= rounding * wanted).all(), setting
        assert abs(attention_factor(config.rope_scaling) - reference.attention_scaling) < 1e-6

        # Tables of a layer, of an angle that is as far off as its frequency.
        positions = torch.tensor([[0, 1, 7, 100, 1023, setting.length - 1]])  # (1, S)
        with torch.device("meta"):
            mixer = Attention(config)
        cos, sin = mixer.prepare(TokenContext(positions=positions), torch.empty(1, 6, config.dim))
        angles = positions[0, :, None] * wanted  # (S, D / 2)
        bound = reference.attention_scaling * (rounding * angles + 2**-21)
        their_tables = reference(torch.empty(0), positions)  # (1, S, D)
        for own, other in zip((cos, sin), their_tables):
            other = other[0, :, : len(wanted)]
            assert ((own[0, :, 0] - other).abs() <= bound).all(), setting

        # Heads that their tables rotate in both.
        generator = torch.Generator().manual_seed(0)
        heads = torch.randn(1, 6, 2, setting.head_dim, generator=generator)  # (1, S, H, D)
        apply = llama if setting.family == "llama" else glm
        turned, _ = apply.apply_rotary_pos_emb(heads, heads, *their_tables, unsqueeze_dim=2)
        halves = tuple(each[:, :, None, : len(wanted)] for each in their_tables)
        assert torch.allclose(rotate(heads, halves), turned, rtol=0, atol=1e-5), setting
        counts["equal"] += 1
    assert min(counts.values()) > len(settings) / 10, counts


def test_a_sample_of_rotary_settings_is_that_of_transformers() -> None:
    compare(Random(0).sample(grid(), 150))


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_all_rotary_settings_are_those_of_transformers() -> None:
    compare(grid())


@pytest.mark.parametrize(
    "rope",
    [
        *({**YARN, **keys} for keys in YARN_KEYS[:9]),
        {**YARN, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        {**YARN, "mscale_all_dim": 0.707, "attention_factor": 1.1},
    ],
    ids=lambda rope: ",".join(f"{key}={rope[key]}" for key in sorted(rope.keys() - YARN.keys())),
)
def test_latent_attention_scales_its_scores_as_transformers(rope: dict[str, Any]) -> None:
    """DeepSeek-V3 multiplies the softmax scale by a factor of its own, whatever cosines have."""
    latent = {
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8},
        "v_head_dim": 6,
    }
    hf = {**Setting("deepseek_v3", 8, table("yarn", 1e4, **rope), 163840).hf(), **latent}
    scaling = FAMILIES["deepseek_v3"].config_from_hf(hf).rope_scaling
    config = transformers.AutoConfig.for_model(**hf)
    wanted = deepseek.yarn_apply_mscale(config.rope_parameters, 1.0)
    assert abs(score_factor(scaling) - wanted) < 1e-6
    rotary = deepseek.DeepseekV3RotaryEmbedding(config)
    assert abs(attention_factor(scaling) - rotary.attention_scaling) < 1e-6

"""The decoder in plain torch: norms, attention, feed-forwards, blocks, multi-token prediction.

`config` is the table [model] of a job as nested dictionaries, `weights` the tensors by the names of
Forge's checkpoints, `prefix` the name of a module with a dot at its end. Shapes: B sequences, S tokens,
D width of the stream, H query heads, K key/value heads, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .rotary import Rotate, make_rotate, no_rotation, yarn_growth

Config = dict[str, Any]
Weights = dict[str, Tensor]
Sublayer = Callable[[Tensor], Tensor]  # (B, S, D) -> (B, S, D)

GATED = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": lambda x: F.gelu(x, approximate="tanh")}
UNGATED = {
    "gelu": F.gelu,
    "gelu_tanh": GATED["geglu_tanh"],
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Multiply by the weight `name`.weight and add the bias, if there is one."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019) over the last dim."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def norm(config: Config, weights: Weights, name: str, x: Tensor) -> Tensor:
    """The norm that `config["norm"]` names."""
    weight, eps = weights[f"{name}.weight"], config["norm_eps"]
    if config["norm"] == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], weight, weights[f"{name}.bias"], eps)
    return rms_norm(x, weight + 1 if config["norm"] == "rms_norm_plus_one" else weight, eps)


def head_norm(config: Config, weights: Weights, name: str, x: Tensor) -> Tensor:
    """RMSNorm of queries and keys, for LayerNorm models too; Gemma's adds 1 to these weights as well."""
    weight = weights[f"{name}.weight"]
    weight = weight + 1 if config["norm"] == "rms_norm_plus_one" else weight
    return rms_norm(x, weight, config["norm_eps"])


def latent_norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    """RMSNorm of a latent, with DeepSeek's 1e-6 whatever `norm_eps` is."""
    return rms_norm(x, weights[f"{name}.weight"], 1e-6)


def feed_forward(config: Config, weights: Weights, prefix: str, x: Tensor) -> Tensor:
    """The feed-forward that `config["feed_forward"]` names (Shazeer 2020): (..., D) -> (..., D)."""
    up = linear(weights, f"{prefix}up_proj", x)
    if config["feed_forward"] in GATED:
        gate = linear(weights, f"{prefix}gate_proj", x)
        hidden = GATED[config["feed_forward"]](gate) * up
    else:
        hidden = UNGATED[config["feed_forward"]](up)
    return linear(weights, f"{prefix}down_proj", hidden)


def segments(documents: Tensor) -> Tensor:
    """Number the runs of equal ids in each sequence (B, S): a document ends where the id changes."""
    changes = documents[:, 1:] != documents[:, :-1]
    return F.pad(changes.cumsum(1), (1, 0))


def visible(documents: Tensor, window: int | None = None) -> Tensor:
    """Return (B, S, S) bool: query i sees key j of its document, i - window < j <= i."""
    numbers = segments(documents)
    places = torch.arange(documents.size(1))
    distance = places[:, None] - places[None, :]
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return near & (numbers[:, :, None] == numbers[:, None, :])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention with all scores: q (B, S, H, D), k and v (B, T, K, D) -> (B, S, H, D).

    `allowed` is (B, S, T) bool, `sinks` (H,): a logit that takes part in the softmax and has no value.
    """
    k = k.repeat_interleave(q.size(2) // k.size(2), dim=2)  # each key head serves H / K query heads
    v = v.repeat_interleave(q.size(2) // v.size(2), dim=2)
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed[:, None], -math.inf)

    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    probabilities = scores.softmax(-1)[..., : k.size(1)]
    return torch.einsum("bhst,bthd->bshd", probabilities, v)


def head_dim(config: Config) -> int:
    """Width of a head of plain attention."""
    return config["head_dim"] or config["dim"] // config["num_heads"]


def project(config: Config, weights: Weights, prefix: str, name: str, x: Tensor) -> Tensor:
    """Project to queries, keys or values (`name` q, k or v), with their norm: (B, S, D) -> (B, S, H, D)."""
    y = linear(weights, f"{prefix}{name}_proj", x)
    heads = (*x.shape[:2], -1, head_dim(config))
    if not config["qk_norm"] or name == "v":
        return y.view(heads)
    y = y if config["qk_norm_over"] == "all_heads" else y.view(heads)
    return head_norm(config, weights, f"{prefix}{name}_norm", y).view(heads)


def attention(
    config: Config, weights: Weights, prefix: str, x: Tensor, turn: Rotate, allowed: Tensor
) -> Tensor:
    """Grouped-query attention (Ainslie et al. 2023): (B, S, D) -> (B, S, D)."""
    q, k, v = (project(config, weights, prefix, name, x) for name in ("q", "k", "v"))
    q, k = turn(q), turn(k)
    out = attend(
        q, k, v, allowed, score_scale(config), config["attention"]["softcap"],
        weights.get(f"{prefix}sinks"),
    )  # fmt: skip
    return linear(weights, f"{prefix}o_proj", out.flatten(2))


def latent_attention(
    config: Config, weights: Weights, prefix: str, x: Tensor, turn: Rotate, allowed: Tensor
) -> Tensor:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): (B, S, D) -> (B, S, D)."""
    mla, heads = mla_config(config), config["num_heads"]
    nope, rope = mla["qk_nope_head_dim"], mla["qk_rope_head_dim"]
    if mla["q_lora_rank"] is None:
        q = linear(weights, f"{prefix}q_proj", x)
    else:
        latent = linear(weights, f"{prefix}q_a_proj", x)
        latent = latent_norm(weights, f"{prefix}q_a_norm", latent)
        q = linear(weights, f"{prefix}q_b_proj", latent)
    q_nope, q_rope = q.view(*x.shape[:2], heads, nope + rope).split([nope, rope], dim=-1)

    # The rotated dims of the keys come from the stream and are the same in all heads.
    latent, k_rope = linear(weights, f"{prefix}kv_a_proj", x).split(
        [mla["kv_lora_rank"], rope], dim=-1
    )
    latent = latent_norm(weights, f"{prefix}kv_a_norm", latent)
    kv = linear(weights, f"{prefix}kv_b_proj", latent).view(*x.shape[:2], heads, -1)
    k_nope, v = kv.split([nope, mla["v_head_dim"]], dim=-1)

    k_rope = k_rope[:, :, None]
    if mla["rope_interleave"]:  # pairs of neighbors become pairs of halves
        q_rope, k_rope = (torch.cat([y[..., ::2], y[..., 1::2]], -1) for y in (q_rope, k_rope))
    q = torch.cat([q_nope, turn(q_rope)], dim=-1)
    k = torch.cat([k_nope, turn(k_rope).expand(-1, -1, heads, -1)], dim=-1)
    out = attend(q, k, v, allowed, score_scale(config), config["attention"]["softcap"])
    return linear(weights, f"{prefix}o_proj", out.flatten(2))


def mla_config(config: Config) -> Config:
    """The table [model.mla], with its defaults where the job has none."""
    return config["mla"] or {
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": False,
    }


def score_scale(config: Config) -> float:
    """Factor of the attention scores; `config` is that of a layer."""
    scale = config["attention"]["scale"]
    if config["mixer"] == "mla":
        mla, scaling = mla_config(config), config["rope_scaling"]
        if scale is None:
            scale = (mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"]) ** -0.5
        if scaling and scaling["name"] == "yarn" and scaling["mscale_all_dim"]:
            scale *= yarn_growth(scaling["factor"], scaling["mscale_all_dim"]) ** 2
        return scale
    base = config["mup"]["base_head_dim"]
    if config["parametrization"] == "mup" and base is not None:
        return base**0.5 / head_dim(config)  # 1 / D, and D ** -0.5 at the base width
    return head_dim(config) ** -0.5 if scale is None else scale


def width_and_depth(config: Config) -> tuple[float, float]:
    """Return dim and num_layers over those of the base model; (1, 1) without mup."""
    if config["parametrization"] != "mup":
        return 1.0, 1.0
    layers = config["mup"]["base_num_layers"]
    depth = config["num_layers"] / layers if layers is not None else 1.0
    return config["dim"] / config["mup"]["base_dim"], depth


def of_layer(config: Config, layer: int) -> Config:
    """Return `config` with the window and the rotary embedding of a layer's type.

    Its key `rope` is False where the layer has no rotary positions.
    """
    pattern = config["layer_pattern"]
    name = pattern[layer % len(pattern)] if pattern else "global"
    given = (config["layer_types"] or {}).get(name)
    if given is None:
        return config | {"rope": True}
    found = config | {"rope": given["rope"]}
    if given["window"] is not None:
        found["attention"] = config["attention"] | {"window": given["window"]}
    if given["rope_theta"] is not None:
        found["rope_theta"] = given["rope_theta"]
    if not given["rope_scaling"] or not given["rope"]:
        found["rope_scaling"] = None
    return found


def layer_rotate(config: Config, positions: Tensor, dtype: torch.dtype) -> Rotate:
    """Return the rotation of queries and keys by positions (B, S) or (B, 3, S); `config` is that of a layer."""
    if not config["rope"]:
        return no_rotation
    width = mla_config(config)["qk_rope_head_dim"] if config["mixer"] == "mla" else head_dim(config)
    dim = int(width * config["partial_rotary_factor"])
    axes = config.get("mrope")  # of models with images
    return make_rotate(positions, dim, config["rope_theta"], config["rope_scaling"], dtype, axes)


def block(
    config: Config, weights: Weights, prefix: str, x: Tensor, mixer: Sublayer, ff: Sublayer
) -> Tensor:
    """Two sublayers with their norms around the stream x (B, S, D).

    pre_norm: x + f(norm(x)); post_norm (OLMo 2): x + norm(f(x)); sandwich (Gemma 2): both norms.
    """
    scale = config["residual_scale"] * width_and_depth(config)[1] ** -0.5
    for name, sublayer in (("mixer", mixer), ("feed_forward", ff)):
        y = x
        if config["block"] != "post_norm":
            y = norm(config, weights, f"{prefix}{name}_norm", y)
        y = sublayer(y)
        if config["block"] != "pre_norm":
            y = norm(config, weights, f"{prefix}{name}_post_norm", y)
        x = x + scale * y
    return x


def mixer_of_layer(
    config: Config,
    weights: Weights,
    prefix: str,
    layer: int,
    positions: Tensor,
    documents: Tensor,
    mask: Callable[[Tensor, int | None], Tensor] = visible,
) -> Sublayer:
    """Return the token mixer of a layer as a function of its input; `mask` says which tokens it sees."""
    config = of_layer(config, layer)
    mix = latent_attention if config["mixer"] == "mla" else attention
    allowed = mask(documents, config["attention"]["window"])

    def mixer(x: Tensor) -> Tensor:
        turn = layer_rotate(config, positions, x.dtype)
        return mix(config, weights, prefix, x, turn, allowed)

    return mixer


def embed(config: Config, weights: Weights, tokens: Tensor) -> Tensor:
    """Look up tokens (..., S) in the embedding: (..., S, D)."""
    return weights["embedding.weight"][tokens] * config["embedding_scale"]


def head(config: Config, weights: Weights, x: Tensor) -> Tensor:
    """Logits (..., V) of the normed stream (..., D)."""
    table = "embedding" if config["tie_embeddings"] else "lm_head"
    logits = F.linear(x, weights[f"{table}.weight"])
    logits = logits * (config["logits_scale"] / width_and_depth(config)[0])
    cap = config["logits_softcap"]
    return logits if cap is None else cap * torch.tanh(logits / cap)


# A feed-forward of a layer: (prefix of the feed-forward, layer, x) -> y; mixtures replace it.
FeedForward = Callable[[str, int, Tensor], Tensor]


def decoder(
    config: Config,
    weights: Weights,
    x: Tensor,
    positions: Tensor,
    documents: Tensor,
    ff: FeedForward,
) -> Tensor:
    """Run all blocks on the embedded tokens x (B, S, D), without the final norm."""
    for layer in range(config["num_layers"]):
        prefix = f"layers.{layer}."
        mixer = mixer_of_layer(config, weights, f"{prefix}mixer.", layer, positions, documents)

        def sublayer(y: Tensor, name: str = f"{prefix}feed_forward.", layer: int = layer) -> Tensor:
            return ff(name, layer, y)

        x = block(config, weights, prefix, x, mixer, sublayer)
    return x


def mtp_module(
    config: Config,
    weights: Weights,
    module: int,
    stream: Tensor,
    next_tokens: Tensor,
    positions: Tensor,
    documents: Tensor,
    ff: FeedForward,
) -> Tensor:
    """One module of multi-token prediction (DeepSeek-V3, section 2.2): stream (B, S, D) -> the same.

    `next_tokens` (B, S) are the tokens module + 1 positions later.
    """
    prefix, layer = f"mtp.{module}.", config["num_layers"] + module
    token = norm(config, weights, f"{prefix}token_norm", embed(config, weights, next_tokens))
    stream = norm(config, weights, f"{prefix}stream_norm", stream)
    x = linear(weights, f"{prefix}join", torch.cat([stream, token], dim=-1))

    mixer = mixer_of_layer(config, weights, f"{prefix}block.mixer.", layer, positions, documents)

    def sublayer(y: Tensor) -> Tensor:
        return ff(f"{prefix}block.feed_forward.", layer, y)

    return block(config, weights, f"{prefix}block.", x, mixer, sublayer)

"""Latent attention against its definition, head by head and token by token, and its cache.

Bound: fp32 1e-5 of max|a - b| / max|b|.
"""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import forge_core
from forge_core.lora import LoRAConfig, lora
from forge_core.model import LatentAttention, MLAConfig, attention_ops
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

B, S, M, H = 2, 11, 20, 3
WIDE = MLAConfig(
    q_lora_rank=10, kv_lora_rank=7, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6
)
CASES = {
    "latent queries": (WIDE, {}),
    "plain queries": (dataclasses.replace(WIDE, q_lora_rank=None), {}),
    "wide values": (dataclasses.replace(WIDE, v_head_dim=12), {}),
    "neighbours": (dataclasses.replace(WIDE, rope_interleave=True), {}),
    "nothing turns": (WIDE, {"partial_rotary_factor": 0.0}),
    "biases": (WIDE, {"qkv_bias": True, "o_bias": True}),
    "scale and window": (WIDE, {"attention": forge_core.AttentionSpec(scale=0.7, window=4)}),
    "softcap": (WIDE, {"attention": forge_core.AttentionSpec(softcap=0.6)}),
    "yarn": (
        WIDE,
        {
            "rope_scaling": forge_core.RopeScaling(
                4.0, name="yarn", original_max_position=8, mscale=0.7, mscale_all_dim=0.5
            )
        },
    ),
}
LENGTHS = {"whole": None, "packed": [[4, 7], [1, 8, 2]]}


def config_of(case: str, **more) -> forge_core.TransformerConfig:
    widths, options = CASES[case]
    shape = {"dim": M, "num_heads": H, "num_layers": 2, "mixer": "mla", "mla": widths}
    return forge_core.TransformerConfig(13, **shape, **options, **more)


def layer_of(case: str) -> LatentAttention:
    layer = LatentAttention(config_of(case))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return layer


def context(lengths: list[list[int]] | None) -> forge_core.TokenContext:
    if lengths is None:
        return forge_core.TokenContext()
    ids = [[i for i, n in enumerate(row) for _ in range(n)] for row in lengths]
    return forge_core.TokenContext(document_ids=torch.tensor(ids))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turn(x: Tensor, position: int, c: forge_core.TransformerConfig) -> Tensor:
    """The pairs of x (R,) as complex numbers, turned by position times their frequency and grown."""
    width, scaling, growth = x.numel(), c.rope_scaling, 1.0
    frequencies = [c.rope_theta ** (-2 * i / width) for i in range(width // 2)]
    if scaling is not None:
        low, high = (
            width * math.log(scaling.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(c.rope_theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )  # fmt: skip
        low, high = max(math.floor(low), 0), math.ceil(high)
        shares = [min(max((i - low) / (high - low), 0), 1) for i in range(width // 2)]
        frequencies = [f * (s / scaling.factor + 1 - s) for f, s in zip(frequencies, shares)]
        grown = [0.1 * m * math.log(scaling.factor) + 1 for m in (0.7, 0.5)]
        growth = grown[0] / grown[1]
    if c.partial_rotary_factor == 0.0:
        return x
    interleaved = c.mla.rope_interleave
    pairs = (x[::2], x[1::2]) if interleaved else x.chunk(2)
    angle = torch.tensor([position * f for f in frequencies])
    turned = torch.complex(*pairs) * torch.polar(torch.full_like(angle, growth), angle)
    return torch.cat((turned.real, turned.imag))


def reference(
    layer: LatentAttention, c: forge_core.TransformerConfig, x: Tensor, lengths
) -> Tensor:
    w, p = c.mla, dict(layer.named_parameters())
    bias = {n: p.get(f"{n}.bias", torch.zeros(())) for n in ("q_a_proj", "kv_a_proj", "o_proj")}
    if w.q_lora_rank is None:
        q = x @ p["q_proj.weight"].T
    else:
        down = norm(x @ p["q_a_proj.weight"].T + bias["q_a_proj"], p["q_a_norm.weight"])
        q = down @ p["q_b_proj.weight"].T
    down = x @ p["kv_a_proj.weight"].T + bias["kv_a_proj"]
    latent = norm(down[..., : w.kv_lora_rank], p["kv_a_norm.weight"])
    shared = down[..., w.kv_lora_rank :]
    kv = latent @ p["kv_b_proj.weight"].T
    nope, spec = w.qk_nope_head_dim, c.attention
    scale = spec.scale or (nope + w.qk_rope_head_dim) ** -0.5
    if c.rope_scaling is not None:
        scale *= (0.1 * 0.5 * math.log(c.rope_scaling.factor) + 1) ** 2
    out = []
    for b in range(B):
        rows = [S] if lengths is None else lengths[b]
        places = [(n, i) for n, length in enumerate(rows) for i in range(length)]
        for t, (document, position) in enumerate(places):
            heads = []
            for h in range(H):
                own = q[b, t].view(H, -1)[h]
                query = torch.cat((own[:nope], turn(own[nope:], position, c)))
                scores, values = [], []
                for s, (other, at) in enumerate(places[: t + 1]):
                    if other == document and t - s < (spec.window or S):
                        head = kv[b, s].view(H, -1)[h]
                        key = torch.cat((head[:nope], turn(shared[b, s], at, c)))
                        score = query @ key * scale
                        cap = spec.softcap
                        scores.append(score if cap is None else cap * torch.tanh(score / cap))
                        values.append(head[nope:])
                heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            out.append(torch.cat(heads) @ p["o_proj.weight"].T + bias["o_proj"])
    return torch.stack(out).view(B, S, M)


def error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach(), wanted.detach()
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.lane("quick")
@pytest.mark.parametrize("rows", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients_equal_the_definition(case: str, rows: str) -> None:
    layer, lengths = layer_of(case), LENGTHS[rows]
    x = torch.randn(B, S, M, generator=torch.Generator().manual_seed(1))
    upstream = torch.randn(B, S, M, generator=torch.Generator().manual_seed(2))
    found = []
    for compute in (
        lambda x: layer(x, context(lengths)),
        lambda x: reference(layer, config_of(case), x, lengths),
    ):
        mine = x.clone().requires_grad_()
        layer.zero_grad()
        out = compute(mine)
        out.backward(upstream)
        grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
        found.append({"out": out.detach(), "x": mine.grad, **grads})
    got, wanted = found
    for name in wanted:
        assert error(got[name], wanted[name]) < 1e-5, name


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("rows", LENGTHS)
def test_values_are_padded_only_where_no_kernel_takes_them(
    monkeypatch: pytest.MonkeyPatch, rows: str, narrow: bool
) -> None:
    """`takes_narrow_values` asks torch's checks; tests/null_gpu has its answers on sm_90."""
    layer, config = layer_of("plain queries"), config_of("plain queries")
    x = torch.randn(B, S, M, generator=torch.Generator().manual_seed(1))
    widths = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        widths.append((q.size(-1), v.size(-1)))
        assert not narrow or v.storage_offset() * v.element_size() % 16 == 0
        return real(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(attention_ops, "takes_narrow_values", lambda *given: narrow)
    out = layer(x, context(LENGTHS[rows]))
    assert set(widths) == {(9, 6 if narrow else 9)}
    assert error(out, reference(layer, config, x, LENGTHS[rows])) < 1e-5

    # an attention of other code is given one width
    layer.attend = lambda q, k, v, ctx: widths.append((q.size(-1), v.size(-1))) or v
    widths.clear()
    assert layer(x).shape == x.shape
    assert widths == [(9, 9)]


def model_of(case: str) -> forge_core.Transformer:
    model = forge_core.Transformer(config_of(case)).eval()
    forge_core.initialize(model, seed=3, std=0.4, residual_std=0.4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()))
    return model


@pytest.mark.lane("quick")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("parts", [(1,) * S, (4, 1, 1, 5), (3, 8)])
@torch.no_grad()
def test_absorbed_decoding_equals_the_plain_forward(case: str, parts: tuple[int, ...]) -> None:
    """Also several new tokens after cached ones, with documents that go on, end and begin in a part."""
    model = model_of(case)
    tokens = torch.randint(0, 13, (B, S), generator=torch.Generator().manual_seed(4))
    for lengths in LENGTHS.values():
        ids = context(lengths).document_ids
        wanted, cache, got = model(tokens, document_ids=ids), model.new_cache(S), []
        for piece, some in zip(
            tokens.split(parts, 1), (ids if ids is not None else tokens).split(parts, 1)
        ):
            got.append(model(piece, document_ids=None if ids is None else some, cache=cache))
        assert error(torch.cat(got, 1), wanted) < 1e-5


@torch.no_grad()
def test_decoding_never_makes_keys_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("latent queries")
    cache, calls = model.new_cache(4), []
    monkeypatch.setattr(
        LatentAttention, "_expanded", lambda *_: calls.append(1) or torch.zeros(1, 1, H, 6)
    )
    model(torch.tensor([[1]]), cache=cache)
    assert len(calls) == 2  # of the empty cache
    cache = model.new_cache(4)
    monkeypatch.undo()
    model(torch.tensor([[1, 2]]), cache=cache)
    monkeypatch.setattr(LatentAttention, "_expanded", None)
    model(torch.tensor([[3]]), cache=cache)


@torch.no_grad()
def test_a_cache_holds_one_latent_per_token() -> None:
    """kv_lora_rank + qk_rope_head_dim numbers, once; heads would hold H (N + R + V)."""
    model = model_of("latent queries")
    cache = model.new_cache(50)
    model(torch.zeros(B, 6, dtype=torch.int64), cache=cache)
    for layer in cache.layers.values():
        assert layer.keys is layer.values
        assert layer.keys.untyped_storage().nbytes() == 4 * B * 50 * (7 + 4)


@torch.no_grad()
def test_generation_of_ragged_prompts_equals_that_of_each_prompt() -> None:
    model, greedy = model_of("yarn"), forge_core.SamplingConfig(temperature=0.0)
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8]]
    together = forge_core.generate(model, prompts, 6, greedy)
    for row, prompt in zip(together, prompts):
        assert torch.equal(row, forge_core.generate(model, [prompt], 6, greedy)[0])


def test_an_explicit_mask_is_computed_and_not_decoded() -> None:
    spec = forge_core.AttentionSpec(mask="forge_core.model.attention_ops:causal_mask")
    layer = LatentAttention(dataclasses.replace(config_of("latent queries"), attention=spec))
    layer.load_state_dict(layer_of("latent queries").state_dict())
    x = torch.randn(B, S, M, generator=torch.Generator().manual_seed(1))
    assert error(layer(x), layer_of("latent queries")(x)) < 1e-5
    model = forge_core.Transformer(dataclasses.replace(config_of("latent queries"), attention=spec))
    with rejects("attention.mask", spec.mask, "unsupported"):
        model.new_cache(4)


def test_adapters_of_its_projections_begin_as_the_layer_was() -> None:
    """Not of the one that decoding absorbs, which is refused."""
    model, tokens = model_of("latent queries"), torch.tensor([[1, 2, 3]])
    wanted = model(tokens)
    with rejects("lora.patterns", code="type", where="layers.0.mixer.kv_b_proj (UpProjection)"):
        lora(model, LoRAConfig(("*.mixer.*_proj",)))
    lora(model, LoRAConfig(("*.mixer.q_*_proj", "*.mixer.kv_a_proj", "*.o_proj")), base_dtype=None)
    assert torch.equal(model(tokens), wanted)
    assert model.layers["0"].mixer.init_table(1.0, 0.5)["o_proj.weight"] == ("normal", 0.5)


def test_initial_values_and_their_names() -> None:
    model = forge_core.Transformer(config_of("biases", init_std=0.3))
    own = {n: p for n, p in model.named_parameters() if n.startswith("layers.0.mixer.")}
    assert {n.removeprefix("layers.0.mixer.") for n in own} == {
        *("q_a_proj.weight", "q_a_proj.bias", "q_a_norm.weight", "q_b_proj.weight"),
        *("kv_a_proj.weight", "kv_a_proj.bias", "kv_a_norm.weight", "kv_b_proj.weight"),
        *("o_proj.weight", "o_proj.bias"),
    }
    for name, parameter in own.items():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            std = 0.3 / 2 if "o_proj" in name else 0.3  # / sqrt(2 layers * 2)
            assert float(parameter.detach().std()) == pytest.approx(std, rel=0.25), name


@pytest.mark.parametrize("window", [None, 3])
def test_flops_are_those_of_matrices_and_of_the_pairs_that_see(window: int | None) -> None:
    c = dataclasses.replace(
        config_of("latent queries"), attention=forge_core.AttentionSpec(window=window), num_layers=1
    )
    layer = LatentAttention(c)
    matrices = 2 * sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    pairs = sum(min(t + 1, window or S) for t in range(S)) / S  # that a token sees on average
    exact = matrices + 2 * H * (5 + 4 + 6) * pairs
    slack = H * (5 + 4 + 6)  # half a token is its own pair, as in `Attention`
    assert abs(layer.flops_per_token(S) - exact) <= slack
    assert forge_core.flops_per_token(forge_core.Transformer(c), S) > 3 * layer.flops_per_token(S)


@pytest.mark.parametrize(
    ("keys", "key", "value", "code"),
    [
        ({"mixer": "attention"}, "mla", ..., "foreign"),
        ({"num_kv_heads": 1}, "num_kv_heads", 1, "mixer"),
        ({"head_dim": 8}, "head_dim", 8, "mixer"),
        ({"qk_norm": True}, "qk_norm", True, "mixer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", 0.5, "mixer"),
        ({"attention": forge_core.AttentionSpec(sinks=True)}, "attention.sinks", True, "mixer"),
    ],
)
def test_keys_that_latent_attention_does_not_read_are_rejected(
    keys: dict, key: str, value: object, code: str
) -> None:
    with rejects(key, value, code, where="model: "):
        dataclasses.replace(config_of("latent queries", **{}), **{"dim": 24, **keys})


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("kv_lora_rank", 0, "range"),
        ("qk_rope_head_dim", 3, "even"),
        ("rope_interleave", 1, "type"),
    ],
)
def test_widths_are_checked(key: str, value: object, code: str) -> None:
    with rejects(key, value, code, where="mla: "):
        MLAConfig(**{key: value})

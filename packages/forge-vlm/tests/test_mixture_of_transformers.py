"""Mixture of transformers: weights of each modality around one attention."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from forge_core import SamplingConfig, Transformer, generate
from forge_core.model import AttentionSpec
from forge_testing.problems import rejects
from forge_vlm import VLM, FusionConfig, ModalityConfig, VisionConfig, VLMConfig
from forge_vlm.fusion import MixtureOfTransformersConfig
from forge_vlm.vision import ViTConfig

pytestmark = pytest.mark.lane("test")

SIZES = dict(vocab_size=64, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=64)
#: Three modalities: text, and two of discrete tokens beside a placeholder.
MODALITIES = {
    "image": ModalityConfig(first_id=63),
    "speech": ModalityConfig(first_id=40, num_ids=8, discrete=True),
    "sketch": ModalityConfig(first_id=50, num_ids=8, discrete=True),
}


def config(fusion="mixture_of_transformers", modalities=MODALITIES, **options):
    vit = ViTConfig(image_size=8, patch_size=4, dim=8, num_layers=1, num_heads=2)
    fusion = FusionConfig(fusion) if isinstance(fusion, str) else fusion
    return VLMConfig(
        **{**SIZES, **options}, vision=VisionConfig(vit=vit), modalities=modalities, fusion=fusion
    )


def noisy(model, seed=0, std=0.3):
    """Weights that show differences: those of the first draw are small and norms are 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, std, generator=generator).add_(parameter.ndim == 1)
    return model.eval()


def mixed_rows(rows=3, size=14):
    """Tokens of all modalities in any order, and documents with padding in front, inside and behind."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, 60, (rows, size), generator=generator)
    documents = torch.zeros(rows, size, dtype=torch.int64)
    documents[0, :3], documents[1, 5:7], documents[1, 7:], documents[2, 11:] = -1, -1, 1, -1
    return tokens, documents


def tied(model):
    """All towers as copies of text's."""
    with torch.no_grad():
        for block in model.layers.values():
            for name, (source,) in block.warm_sources().items():
                block.get_parameter(name).copy_(block.get_parameter(source))
    return model


def text_of(model, c):
    names = set(Transformer(c).state_dict())
    text = Transformer(c).eval()
    text.load_state_dict({n: v for n, v in model.state_dict().items() if n in names})
    return text


@pytest.mark.parametrize("block", ["pre_norm", "post_norm", "sandwich"])
def test_tied_copies_are_the_dense_transformer(block):
    c = config(block=block, qk_norm=True)
    model = tied(noisy(VLM(c)))
    tokens, documents = mixed_rows()
    wanted = text_of(model, c)(tokens, document_ids=documents)
    found = model(tokens, document_ids=documents)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 * wanted.abs().max().item())


def test_only_text_equals_the_text_model_bit_by_bit():
    c = config()
    model = noisy(VLM(c))
    tokens = torch.randint(1, 40, (2, 9))
    wanted = text_of(model, c)(tokens)
    assert torch.equal(model(tokens), wanted)
    assert torch.equal(model(tokens, images=torch.zeros(0, 3, 8, 8)), wanted)


def test_towers_without_tokens_have_gradients_of_zero():
    model = noisy(VLM(config())).train()
    model(torch.randint(1, 40, (2, 9))).sum().backward()
    for name, parameter in model.named_parameters():
        if ".towers." in name:
            assert parameter.grad is not None, name
            assert not parameter.grad.any()


# ------------------------------------------------------------ the paper's algorithm, slowly


def norm64(x, weight):
    return x / (x.square().mean() + 1e-5).sqrt() * weight


def turn64(x, position, theta=10000.0):
    half = len(x) // 2
    out = x.clone()
    for d in range(half):
        angle = position * theta ** (-2 * d / len(x))
        out[d] = x[d] * math.cos(angle) - x[d + half] * math.sin(angle)
        out[d + half] = x[d + half] * math.cos(angle) + x[d] * math.sin(angle)
    return out


def algorithm_1(weights, layer, x, kinds, visible, c):
    """Lines 1 to 16 of the paper for one layer and one row, token by token: norms behind the sublayers.

    x (S, D) float64, kinds: the prefix of each token's weights, visible[i]: the tokens that i sees, with positions.
    """
    heads, kv_heads, width = c.num_heads, c.resolved_num_kv_heads, c.resolved_head_dim

    def w(i, name):
        return weights[f"layers.{layer}.{kinds[i]}{name}.weight"].double()

    positions = [next((p for j, p in visible[i] if j == i), 0) for i in range(len(x))]
    q, k, v = (
        [(w(i, f"mixer.{n}_proj") @ x[i]).view(-1, width) for i in range(len(x))] for n in "qkv"
    )
    out = torch.empty_like(x)
    for i in range(len(x)):
        seen = []
        for h in range(heads):
            g = h * kv_heads // heads
            query = turn64(q[i][h], positions[i])
            scores = torch.stack(
                [query @ turn64(k[j][g], p) / math.sqrt(width) for j, p in visible[i]]
            ).softmax(0)
            seen.append(sum(s * v[j][g] for s, (j, _) in zip(scores, visible[i])))
        attended = w(i, "mixer.o_proj") @ torch.cat(seen)
        h = x[i] + norm64(attended, w(i, "mixer_post_norm"))
        gate = w(i, "feed_forward.gate_proj") @ h
        fed = w(i, "feed_forward.down_proj") @ (
            gate * gate.sigmoid() * (w(i, "feed_forward.up_proj") @ h)
        )
        out[i] = h + norm64(fed, w(i, "feed_forward_post_norm"))
    return out


def test_it_is_algorithm_1_of_the_paper():
    c = config(block="post_norm")
    model = noisy(VLM(c))
    tokens, documents = mixed_rows()
    weights = model.state_dict()
    found = model(tokens, document_ids=documents).double()
    for row in range(len(tokens)):
        kinds, visible = [], []
        for i, token in enumerate(tokens[row].tolist()):
            name = next(
                (n for n in ("speech", "sketch") if 0 <= token - MODALITIES[n].first_id < 8), None
            )
            if documents[row, i] < 0:
                name = None
            kinds.append("" if name is None else f"towers.{name}.")
            same = [
                j for j in range(i + 1) if (documents[row, j : i + 1] == documents[row, i]).all()
            ]
            visible.append([(j, n) for n, j in enumerate(same)])
        x = weights["embedding.weight"].double()[tokens[row]]
        for layer in range(c.num_layers):
            x = algorithm_1(weights, layer, x, kinds, visible, c)
        x = torch.stack([norm64(t, weights["norm.weight"].double()) for t in x])
        wanted = x @ weights["lm_head.weight"].double().T
        error = (found[row] - wanted).abs()[documents[row] >= 0].max() / wanted.abs().max()
        assert error < 1e-5


# ------------------------------------------------------------ names, numbers, cost


def test_F71_the_order_of_declaration_does_not_matter():
    tokens, documents = mixed_rows()
    turned = dict(reversed(MODALITIES.items()))
    one, other = (VLM(config(modalities=m)).eval() for m in (MODALITIES, turned))
    assert set(one.state_dict()) == set(other.state_dict())
    assert torch.equal(one(tokens, document_ids=documents), other(tokens, document_ids=documents))


def test_modalities_that_share_have_one_tower():
    share = MixtureOfTransformersConfig(share={"sketch": "image", "speech": "text"})
    fusion = FusionConfig("mixture_of_transformers", mixture_of_transformers=share)
    model = noisy(VLM(config(fusion)))
    assert set(model.layers["0"].towers) == {"image"}
    before = model(torch.tensor([[1, 50, 41]]))
    with torch.no_grad():
        model.layers["1"].towers["image"].mixer.o_proj.weight.add_(1.0)
    after = model(torch.tensor([[1, 50, 41]]))
    moved = (before - after).abs().amax(-1) > 0
    assert moved.tolist() == [[False, True, False]]


def test_flops_of_a_token_are_those_of_the_dense_model():
    c = config(num_layers=3, images_per_row=0)
    model, text, tokens = VLM(c).eval(), Transformer(c), torch.arange(36, 52).view(1, -1)
    counted = []
    # before 2.15 torch counts nothing for attention's kernel on a CPU
    nothing = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *_, **__: 0}
    for each in (model, text):
        with FlopCounterMode(display=False, custom_mapping=nothing) as counter, torch.no_grad():
            each(tokens)
        counted.append(counter.get_total_flops())
        assert each.flops_per_token(16) == text.flops_per_token(16)
    attention = 3 * 2 * 16 * SIZES["dim"]
    assert counted[0] == counted[1] == 16 * (model.flops_per_token(16) - attention)


def test_generation_equals_full_forwards_over_all_modalities():
    model = noisy(VLM(config()))
    with torch.no_grad():
        model.lm_head.weight[63] = -10 * model.lm_head.weight.mean(0)
    images = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    prompts = [torch.tensor([1, 63, 63, 63, 63, 44]), torch.tensor([7, 52])]
    new = generate(model, prompts, 16, SamplingConfig(temperature=0.0), extras={"images": images})
    assert (new >= 40).any()  # tokens of another tower are among them
    for row, own in ((0, {"images": images}), (1, {})):
        whole = prompts[row]
        for step in range(16):
            with torch.no_grad():
                chosen = model(whole[None], **own)[0, -1].argmax()
            assert chosen == new[row, step]
            whole = torch.cat([whole, chosen[None]])


def test_a_placeholder_without_media_is_text():
    model = noisy(VLM(config()))
    tokens = torch.tensor([[1, 63, 5]])
    assert torch.equal(model(tokens), text_of(model, config())(tokens))


def test_a_stage_of_a_pipeline_needs_the_tokens():
    c = config()
    model, (tokens, documents) = noisy(VLM(c)), mixed_rows()
    stream = model.embed(tokens)
    wanted = model(tokens, document_ids=documents)
    assert torch.equal(model(stream, document_ids=documents, token_ids=tokens), wanted)
    with rejects("token_ids", ..., "missing"):
        model(stream, document_ids=documents)


@pytest.mark.parametrize(
    ("options", "key", "value", "code"),
    [
        ({"attention": AttentionSpec(sinks=True)}, "attention.sinks", True, "fusion"),
        ({"mixer": "mla", "num_kv_heads": 4}, "mixer", "mla", "fusion"),
        ({"modalities": {"text": ModalityConfig(63)}}, "modalities.text", ..., "name"),
        (
            {
                "fusion": FusionConfig(
                    "mixture_of_transformers", MixtureOfTransformersConfig({"a": "image"})
                )
            },
            *("fusion.mixture_of_transformers.share", {"a": "image"}, "unknown"),
        ),
    ],
)
def test_unsupported_settings_are_rejected(options, key, value, code):
    with rejects(key, value, code):
        config(**options)


def test_factories_of_parts_that_it_builds_are_rejected():
    def factory(layer, num=0):
        return None

    with rejects("feed_forward", factory, "built_in"):
        VLM(config(), feed_forward=factory)
    with rejects("experts", factory, "fusion"):
        VLM(config(), experts=factory)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *((name, "unsupported") for name in ("mixture_of_depths", "diffusion", "transfusion")),
        ("late", "unknown"),
    ],
)
def test_other_ideas_of_the_papers_are_rejected_by_name(name, code):
    with rejects("name", name, code):
        FusionConfig(name)


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["mixture_of_transformers", "moma"])
def test_compiled_blocks_follow_rows_of_other_modalities(fusion):
    """Traced and run without code generation: sizes of groups become dynamic, results stay."""
    plain, compiled = VLM(config(fusion)).eval(), VLM(config(fusion)).eval()
    for block in compiled.blocks():
        block.compile(backend="eager")
    for seed in range(3):
        tokens = torch.randint(1, 60, (2, 9), generator=torch.Generator().manual_seed(seed))
        tokens[:, : 3 * seed] = 5
        torch.testing.assert_close(compiled(tokens), plain(tokens))

"""Models that begin from weights of smaller ones: what is copied where, and the function that it gives."""

import pytest
import torch

from forge_core import Transformer
from forge_testing.problems import rejects
from forge_vlm import VLM, FusionConfig, ModalityConfig, VisionConfig, VLMConfig
from forge_vlm.fusion import MoMaConfig
from forge_vlm.vision import ViTConfig
from forge_vlm.warm_start import warm_start

pytestmark = pytest.mark.lane("test")

SIZES = dict(vocab_size=64, dim=16, num_layers=2, num_heads=4, max_seq_len=64)
MODALITIES = {
    "image": ModalityConfig(first_id=63),
    "speech": ModalityConfig(first_id=40, num_ids=12, discrete=True),
}


def config(fusion="joint_decoder", vocab_size=64, **moma):
    vit = ViTConfig(image_size=8, patch_size=4, dim=8, num_layers=1, num_heads=2)
    return VLMConfig(
        **{**SIZES, "vocab_size": vocab_size},
        vision=VisionConfig(vit=vit),
        modalities=MODALITIES,
        fusion=FusionConfig(fusion, moma=MoMaConfig(**moma)),
    )


def noisy(model):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator).add_(parameter.ndim == 1)
    return model.eval()


def text_model(**options):
    return noisy(Transformer(config(**options)))


def mixed_rows():
    tokens = torch.randint(1, 60, (3, 12), generator=torch.Generator().manual_seed(0))
    assert (tokens >= 40).any()
    return tokens


def same(model, wanted, tokens):
    found = model(tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


def test_a_joint_decoder_takes_the_text_models_weights():
    text, model = text_model(), VLM(config())
    before = {n: v.clone() for n, v in model.state_dict().items()}
    report = warm_start(model, text.state_dict())
    assert set(report.copied) == set(text.state_dict())
    assert report.duplicated == report.unused == ()
    assert report.fresh
    assert all(name.startswith(("vision.", "adapter.")) for name in report.fresh)
    for name, value in model.state_dict().items():
        assert torch.equal(value, text.state_dict().get(name, before[name]))


def test_towers_begin_as_the_text_model():
    text, model = text_model(), VLM(config("mixture_of_transformers")).eval()
    report = warm_start(model, text.state_dict())
    towers = {n for n in model.state_dict() if ".towers." in n}
    assert set(report.duplicated) == towers
    assert set(report.copied) == set(text.state_dict())
    same(model, text(mixed_rows()), mixed_rows())
    # a second start from its own weights finds each tower's
    other = VLM(config("mixture_of_transformers"))
    assert warm_start(other, model.state_dict()).duplicated == ()


@pytest.mark.parametrize(
    "options",
    [
        {"experts": {"speech": 2}},
        {"router": "expert_choice", "capacity_factor": 4.0},
        {"router": "auxiliary_router", "capacity_factor": 4.0, "gumbel_noise": 0.0},
    ],
)
def test_experts_begin_as_the_dense_feed_forward(options):
    """With normalized gates, where each token has an expert, the model is the dense one."""
    text, model = text_model(), VLM(config("moma", **options)).train()
    report = warm_start(model, text.state_dict())
    assert {n for n in report.duplicated if ".experts.each." not in n} == set()
    assert len(report.duplicated) == sum(".experts." in n for n in model.state_dict())
    assert any(name.endswith("router.weight") for name in report.fresh)
    same(model, text(mixed_rows()), mixed_rows())


def test_experts_begin_as_the_only_one_of_their_group():
    """The paper's way: first one expert of text and one of images, then groups of their copies."""
    seed = noisy(VLM(config("moma", num_experts=1)))
    model = VLM(config("moma", num_experts=4)).eval()
    with rejects("layers.0.feed_forward.groups.image.router.weight", (4, 16), "shape"):
        warm_start(model, seed.state_dict())
    report = warm_start(model, seed.state_dict(), keep=["*.router.weight"])
    assert sum(".experts.each.0." in n for n in report.copied) == 2 * 3 * 3
    assert len(report.duplicated) == 3 * 2 * 3 * 3
    same(model, seed(mixed_rows()), mixed_rows())


class Stack(torch.nn.Module):
    """Experts as stacks of matrices (E, in, out)."""

    def __init__(self, num, hidden=64):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            torch.nn.Parameter(torch.randn(num, *s)) for s in [(16, hidden)] * 2 + [(hidden, 16)]
        )

    def forward(self, rows, counts):
        parts = zip(rows.split(counts.tolist()), self.gate_proj, self.up_proj, self.down_proj)
        silu = torch.nn.functional.silu
        return torch.cat([(silu(x @ gate) * (x @ up)) @ down for x, gate, up, down in parts])


def test_stacks_of_experts_repeat_the_dense_matrices_or_a_stack_of_one():
    text, model = text_model(), VLM(config("moma"), experts=lambda g, n: Stack(n)).eval()
    report = warm_start(model, text.state_dict())
    assert len(report.duplicated) == 2 * 3 * 3
    same(model, text(mixed_rows()), mixed_rows())
    seed = noisy(VLM(config("moma", num_experts=1), experts=lambda g, n: Stack(n)))
    report = warm_start(model, seed.state_dict(), keep=["*.router.weight"])
    assert len(report.duplicated) == 2 * 3 * 3
    same(model, seed(mixed_rows()), mixed_rows())


def test_new_token_ids_keep_their_rows():
    text, model = text_model(), VLM(config(vocab_size=70))
    before = model.embedding.weight.detach().clone()
    report = warm_start(model, text.state_dict())
    assert report.fresh[-2:] == ("embedding.weight[64:]", "lm_head.weight[64:]")
    assert torch.equal(model.embedding.weight[:64], text.embedding.weight)
    assert torch.equal(model.embedding.weight[64:], before[64:])


def test_unused_weights_are_an_error_unless_allowed_and_nothing_is_changed():
    text, model = text_model(), VLM(config())
    weights = {**text.state_dict(), "layers.7.norm.weight": torch.ones(16)}
    before = {n: v.clone() for n, v in model.state_dict().items()}
    with rejects("weights", ["layers.7.norm.weight"], "unused"):
        warm_start(model, weights)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    report = warm_start(model, weights, allow_unused=["layers.7.*"])
    assert report.unused == ("layers.7.norm.weight",)


def test_shapes_that_do_not_fit_and_models_without_storage_are_rejected():
    text = text_model()
    wide = VLM(VLMConfig(**{**SIZES, "dim": 32}, modalities=MODALITIES))
    with rejects("embedding.weight", (64, 32), "shape", where="warm_start"):
        warm_start(wide, text.state_dict())
    with torch.device("meta"):
        empty = VLM(config())
    with rejects("embedding.weight", ..., "placement"):
        warm_start(empty, text.state_dict())

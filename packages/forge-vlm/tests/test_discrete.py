"""Images as discrete tokens: no encoder, learnt like text, and written by `generate`."""

import pytest
import torch

import forge_vlm
from forge_core import SamplingConfig, cross_entropy, generate
from forge_testing.problems import rejects
from forge_vlm.modalities import modality_ids, modality_losses, numbers_by_id, trained_modalities

pytestmark = pytest.mark.lane("test")

IMAGE = forge_vlm.ModalityConfig(first_id=16, num_ids=16, discrete=True)
BEGIN, END = 1, 2


def config(name="joint_decoder", **options):
    given = dict(
        vocab_size=32,
        dim=32,
        num_layers=1,
        num_heads=2,
        max_seq_len=32,
        vision=forge_vlm.VisionConfig("none"),
        modalities={"image": IMAGE},
        fusion=forge_vlm.FusionConfig(name),
    )
    return forge_vlm.VLMConfig(**{**given, **options})


def test_images_are_targets_and_the_text_after_them_too():
    tokens = torch.tensor([[5, BEGIN, 17, 31, 16, END, 6], [7, 8, 20, 21, 0, 0, 0]])
    documents = torch.tensor([[0] * 7, [0] * 4 + [-1] * 3])
    modalities = {"image": IMAGE}
    plan = forge_vlm.SequencePlan.of(tokens, documents, numbers_by_id(modalities))
    assert torch.equal(plan.modality_ids(), modality_ids(tokens, documents, modalities))
    assert plan.labels(tokens, trained_modalities(modalities)).tolist() == [
        [BEGIN, 17, 31, 16, END, 6, -100],
        [8, 20, 21, -100, -100, -100, -100],
    ]
    assert plan.labels(tokens).tolist() == [  # as of placeholders
        [BEGIN, -100, -100, -100, END, 6, -100],
        [8, -100, -100, -100, -100, -100, -100],
    ]


def test_losses_of_modalities_add_up_to_the_full_loss():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, 32, generator=generator)
    labels = torch.tensor([[3, 17, 31, -100, 2, 5], [-100, -100, 4, 16, 15, 1]])
    weights = torch.rand(2, 6, generator=generator)
    for given in (None, weights):
        loss = cross_entropy(logits, labels, weights=given)
        parts = modality_losses(loss.token_losses, labels, {"image": IMAGE}, weights=given)
        assert set(parts) == {"text", "image"}
        image = (labels >= 16) & (labels != -100)
        wanted = cross_entropy(
            logits[image], labels[image], weights=None if given is None else given[image]
        )
        torch.testing.assert_close(parts["image"].sum.float(), wanted.sum)
        assert float(parts["image"].count) == pytest.approx(float(wanted.count))
        total = sum(part.sum for part in parts.values())
        torch.testing.assert_close(total.float(), loss.sum)
        assert float(sum(p.count for p in parts.values())) == pytest.approx(float(loss.count))


def drawings():
    """Rows [class, BEGIN, four image tokens of the class, END], and [BEGIN, these tokens, END, class]."""
    generator = torch.Generator().manual_seed(4)
    pictures = torch.randint(16, 32, (8, 4), generator=generator)
    classes = torch.arange(4, 12)[:, None]
    begin, end = (torch.full((8, 1), e) for e in (BEGIN, END))
    picture = torch.cat([begin, pictures, end], dim=1)
    return torch.cat([classes, picture], dim=1), torch.cat([picture, classes], dim=1)


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("fusion", ["joint_decoder", "mixture_of_transformers", "moma"])
def test_it_learns_to_draw_and_to_describe_images(fusion):
    model, (draw, say) = forge_vlm.VLM(config(fusion)), drawings()
    rows = torch.cat([draw, say])
    plan = forge_vlm.SequencePlan.of(rows, None, numbers_by_id(model.config.modalities))
    labels = plan.labels(rows, trained_modalities(model.config.modalities))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(100):
        optimizer.zero_grad()
        cross_entropy(model(rows), labels).mean.backward()
        optimizer.step()
    greedy = SamplingConfig(temperature=0.0)
    assert torch.equal(generate(model, draw[:, :2], 5, greedy), draw[:, 2:])
    assert torch.equal(generate(model, say[:, :6], 1, greedy)[:, 0], say[:, 6])
    other = torch.cat([say[:, :1], say[:, 1:5].roll(1, 0), say[:, 5:6]], dim=1)
    assert torch.equal(generate(model, other, 1, greedy)[:, 0], say[:, 6].roll(1, 0))


def test_the_model_has_no_encoder_and_takes_no_images():
    model = forge_vlm.VLM(config())
    assert model.vision is None
    assert model.adapter is None
    assert model.extra_inputs == ()
    assert not any(n.startswith(("vision", "adapter")) for n in model.state_dict())
    assert not any(n.startswith(("vision", "adapter")) for n in model.parallel_roles())
    assert model.pipeline_parts()["first"] == ("embedding",)
    model.train().eval()
    with pytest.raises(TypeError, match="images"):
        model(torch.ones(1, 3, dtype=torch.int64), images=torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize(
    ("options", "key", "value", "code"),
    [
        ({"modalities": {}}, "modalities", {}, "no_discrete"),
        (
            {"modalities": {"image": forge_vlm.ModalityConfig(5)}},
            "modalities.image",
            ...,
            "requires",
        ),
        ({"adapter": forge_vlm.AdapterConfig("linear")}, "adapter.name", "linear", "requires"),
        (
            {"fusion": forge_vlm.FusionConfig("cross_attention")},
            *("fusion.name", "cross_attention", "requires"),
        ),
    ],
)
def test_keys_that_need_an_encoder_are_rejected(options, key, value, code):
    with rejects(key, value, code):
        config(**options)


def test_keys_of_an_encoder_are_rejected_without_one():
    with rejects("select_layer", (-2,), "no_encoder"):
        forge_vlm.VisionConfig("none", select_layer=(-2,))

"""The native encoder of images of any sizes: each alone, a dense mask in float64, and the ViT of one size."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from forge_core import SamplingConfig, generate, initialize
from forge_testing.problems import rejects
from forge_vlm import VLM, AdapterConfig, FusionConfig, ModalityConfig, VisionConfig, VLMConfig
from forge_vlm.vision import PackedViT, ViTConfig, build_encoder, cut_patches

pytestmark = pytest.mark.lane("test")

IMAGE, PATCH = 63, 4
VIT = ViTConfig(image_size=16, patch_size=PATCH, dim=16, num_layers=2, num_heads=2)
#: Rows and columns in patches: larger and smaller than the table of 4 * 4, the table itself, and one of them twice.
GRIDS = [(2, 6), (4, 4), (8, 2), (2, 6), (10, 8), (2, 2)]


def encoder(merge=1, **options):
    vision = VisionConfig("packed_vit", vit=replace(VIT, merge=merge), **options)
    model = build_encoder(vision)
    initialize(model, 0, std=0.3, residual_std=0.3)
    return model


def pictures(grids=GRIDS, merge=1, dtype=torch.float64):
    """An image of each grid, its patches and its grid."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for rows, columns in grids:
        shape = (1, 3, rows * PATCH, columns * PATCH)
        image = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        found.append((image, *cut_patches(image, PATCH, merge, 1)))
    return found


def media(cut):
    return {
        "patches": torch.cat([p for _, p, _ in cut]),
        "grids": torch.cat([g for _, _, g in cut]),
    }


def by_definition(model, patches, grids):
    """All patches in one sequence, with positions of torch's own resize and a mask of who is of whose image."""
    w, c = dict(model.named_parameters()), model.config.vit
    table = w["positions.weight"].unflatten(0, (c.side, c.side)).permute(2, 0, 1)[None]
    options = {"mode": "bilinear", "align_corners": False, "antialias": True}
    places = [
        cut_patches(F.interpolate(table, size=(rows, columns), **options), 1, c.merge, 1)[0]
        for _, rows, columns in grids.tolist()
    ]
    x = F.linear(patches, w["patches.weight"], w["patches.bias"]) + torch.cat(places)
    number = torch.cat([torch.full((len(p),), n) for n, p in enumerate(places)])
    hidden = number[:, None] != number[None]
    for i in range(c.num_layers):
        own = {n.removeprefix(f"layers.{i}."): p for n, p in w.items()}

        def linear(name, x, own=own):
            return F.linear(x, own[f"{name}.weight"], own[f"{name}.bias"])

        def norm(name, x, own=own):
            return F.layer_norm(x, (c.dim,), own[f"{name}.weight"], own[f"{name}.bias"])

        q, k, v = linear("qkv", norm("norm1", x)).unflatten(1, (3, c.num_heads, -1)).permute(1, 2, 0, 3)  # fmt: skip
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(hidden, -torch.inf)
        x = x + linear("out", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        x = x + linear("down", F.gelu(linear("up", norm("norm2", x)), approximate="tanh"))
    x = F.layer_norm(x, (c.dim,), w["norm.weight"], w["norm.bias"])
    return x.unflatten(0, (-1, c.merge**2)).flatten(1)


def gradients(model, tokens):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(tokens.shape, generator=generator, dtype=tokens.dtype)
    return torch.autograd.grad((tokens * weight).sum(), list(model.parameters()))


def close(found, wanted, bound=1e-10):
    return (found - wanted).abs().max() <= bound * wanted.abs().max()


@pytest.mark.parametrize("merge", [1, 2])
def test_packed_images_are_those_under_a_dense_mask(merge):
    model, given = encoder(merge).double(), media(pictures(merge=merge))
    found, wanted = model(**given).tokens[0], by_definition(model, **given)
    assert found.shape == (sum(r * c for r, c in GRIDS) // merge**2, model.width)
    assert close(found, wanted)
    for name, got, reference in zip(
        dict(model.named_parameters()), gradients(model, found), gradients(model, wanted)
    ):
        assert close(got, reference), name


@pytest.mark.parametrize("merge", [1, 2])
def test_packed_images_are_independent(merge):
    model, cut = encoder(merge).double(), pictures(merge=merge)
    found = model(**media(cut)).tokens
    alone = torch.cat([model(**media([one])).tokens for one in cut], 1)
    assert close(found, alone)
    for got, reference in zip(gradients(model, found), gradients(model, alone)):
        assert close(got, reference)


def test_pixels_of_a_neighbor_do_not_change_an_image():
    model, cut = encoder(), pictures(dtype=torch.float32)
    given = media(cut)
    first, behind = 2 * 6 + 4 * 4, 2 * 6 + 4 * 4 + 8 * 2
    moved = given["patches"].clone()
    moved[first:behind] += 1.0
    before, after = model(**given).tokens[0], model(moved, given["grids"]).tokens[0]
    assert torch.equal(before[:first], after[:first])
    assert torch.equal(before[behind:], after[behind:])
    assert (before[first:behind] - after[first:behind]).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("select", [(), (0, -1)], ids=["last", "layers"])
def test_squares_of_its_size_are_those_of_the_vit(select):
    packed = encoder(select_layer=select)
    plain = build_encoder(VisionConfig(vit=VIT, select_layer=select))
    assert list(plain.state_dict()) == list(packed.state_dict())
    plain.load_state_dict(packed.state_dict())
    cut = pictures([(4, 4)] * 3, dtype=torch.float32)
    wanted = plain(torch.cat([image for image, _, _ in cut])).tokens
    found = packed(**media(cut)).tokens
    assert packed.width == plain.width
    assert close(found, wanted.flatten(0, 1)[None], 1e-6)


def test_a_table_of_its_own_grid_is_itself_bit_by_bit():
    model = encoder()
    assert torch.equal(model._positions([(4, 4)], torch.device("cpu")), model.positions.weight)


@pytest.mark.slow
def test_positions_are_those_of_naflex():
    transformers = pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
    model = encoder()
    table = model.positions.weight.detach().unflatten(0, (4, 4))
    resize = transformers.Siglip2VisionEmbeddings.resize_positional_embeddings
    theirs = resize(table, torch.tensor(GRIDS), max_length=80)
    for (rows, columns), wanted in zip(GRIDS, theirs):
        found = model._positions([(rows, columns)], torch.device("cpu"))
        torch.testing.assert_close(found, wanted[: rows * columns], rtol=1e-5, atol=1e-6)


def test_bytes_are_normalized_and_frames_are_images():
    model = encoder()
    image = torch.randint(0, 256, (2, 3, 8, 16), dtype=torch.uint8)
    patches, grid = cut_patches(image, PATCH, 1, 1)
    assert grid.tolist() == [[2, 2, 4]]
    found = model(patches, grid).tokens
    apart = [cut_patches((frame[None].float() / 255 - 0.5) / 0.5, PATCH, 1, 1) for frame in image]
    wanted = torch.cat([model(*one).tokens for one in apart], 1)
    assert close(found, wanted, 1e-6)
    assert model.token_grids(patches, grid) == [(1, 2, 4)] * 2


def test_a_dummy_is_one_token():
    model = encoder(merge=2)
    found = model(**model.dummy("cpu"))
    assert found.tokens.shape == (1, 1, model.width)
    assert found.tokens.isfinite().all()


def test_initial_values_are_those_of_the_vit_and_blocks_are_its_blocks():
    packed, plain = encoder(), build_encoder(VisionConfig(vit=VIT))
    initialize(plain, 0, std=0.3, residual_std=0.3)
    for name, value in plain.state_dict().items():
        assert torch.equal(packed.state_dict()[name], value), name
    assert packed.blocks() == list(packed.layers)


@pytest.mark.parametrize("merge", [1, 2])
def test_operations_are_those_that_torch_computes(merge):
    """But for the two products that resize the table, once for each grid of a batch."""
    model = encoder(merge)
    work = model.image_work((4 * PATCH * merge) ** 2)
    side = 4 * merge
    given = model.media_of(1, (4 * PATCH * merge) ** 2, "cpu")
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        tokens = model(**given).tokens
    table = 2 * 16 * (4 * 4 * side + 4 * side * side)
    assert work.flops == counter.get_total_flops() - table
    assert tokens.size(1) == work.tokens == work.rows * work.columns == 16
    assert model.image_work().tokens == (4 // merge) ** 2  # image_size, where nothing is said


def model_of(**options):
    given = {"vision": VisionConfig("packed_vit", vit=VIT), **options}
    places = {"image": ModalityConfig(first_id=IMAGE)}
    sizes = dict(vocab_size=64, dim=16, num_layers=2, num_heads=2, max_seq_len=64)
    return VLM(VLMConfig(**{**sizes, **given}, modalities=places))


def rows_of(grids):
    return torch.tensor([[1, *[IMAGE] * r * c, 5, 6] + [7] * (16 - r * c) for r, c in grids])


@pytest.mark.parametrize("adapter", ["linear", "mlp", "none"])
def test_a_decoder_reads_images_of_several_shapes(adapter):
    model, grids = model_of(adapter=AdapterConfig(adapter)), [(2, 6), (4, 4), (8, 2)]
    cut = pictures(grids, dtype=torch.float32)
    assert model.host_inputs[-1] == "grids"
    with torch.no_grad():
        both = model(rows_of(grids), **media(cut))
        alone = [model(rows_of([g]), **media([c])) for g, c in zip(grids, cut)]
    torch.testing.assert_close(both, torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_generation_encodes_once_and_equals_a_full_forward():
    model, grids = model_of(vocab_size=80, init_std=0.2).eval(), [(2, 6), (8, 2)]
    with torch.no_grad():  # no new token is a placeholder, which would want an image
        model.lm_head.weight[IMAGE] = -10 * model.lm_head.weight.mean(0)
    prompts = [[1, *[IMAGE] * rows * columns, 5] for rows, columns in grids]
    cut, calls = pictures(grids, dtype=torch.float32), []
    model.vision.register_forward_hook(lambda *_: calls.append(1))
    greedy = SamplingConfig(temperature=0.0)
    new = generate(model, prompts, 5, greedy, extras=media(cut))
    assert len(calls) == 1
    for prompt, own, answer in zip(prompts, cut, new.tolist()):
        with torch.no_grad():
            whole = model(torch.tensor([[*prompt, *answer[:-1]]]), **media([own]))
        assert whole[0, len(prompt) - 1 :].argmax(-1).tolist() == answer


def test_a_frozen_encoder_keeps_no_activations():
    model, grids = model_of(), [(2, 6), (4, 4)]
    model.vision.requires_grad_(False)
    model.train()
    assert not model.vision.training
    model(rows_of(grids), **media(pictures(grids, dtype=torch.float32))).sum().backward()
    assert all(p.grad is None for p in model.vision.parameters())
    assert all(p.grad is not None for p in model.adapter.parameters())


@pytest.mark.parametrize(
    ("patches", "grids", "key", "value"),
    [
        ((24, 48), [[1, 4, 4]], "patches", (24, 48)),
        ((16, 96), [[1, 4, 4]], "patches", (16, 96)),
        ((12, 48), [[1, 4, 3]], "grids", [1, 4, 3]),
        ((0, 48), [[0, 4, 4]], "grids", [0, 4, 4]),
    ],
)
def test_grids_that_are_not_those_of_the_patches_are_rejected(patches, grids, key, value):
    with rejects(key, value, "shape" if key == "patches" else "divides"):
        encoder(merge=2)(torch.zeros(patches), torch.tensor(grids))


def test_sides_that_patches_do_not_divide_are_rejected():
    with rejects("frames", (16, 20), "divides"):
        cut_patches(torch.zeros(1, 3, 16, 20), patch_size=4, merge=2)


@pytest.mark.parametrize(
    ("options", "key", "value", "code"),
    [
        ({"adapter": AdapterConfig("pixel_shuffle")}, "adapter.name", "pixel_shuffle", "any_size"),
        ({"adapter": AdapterConfig("resampler")}, "adapter.name", "resampler", "any_size"),
        (
            {"fusion": FusionConfig("cross_attention")},
            *("fusion.name", "cross_attention", "any_size"),
        ),
        (
            {"vision": VisionConfig(vit=VIT), "pixels_per_image": 64},
            *("pixels_per_image", 64, "foreign"),
        ),
        ({"pixels_per_image": 0}, "pixels_per_image", 0, "size"),
    ],
)
def test_impossible_arguments_are_rejected(options, key, value, code):
    with rejects(key, value, code):
        model_of(**options)


def test_merged_patches_are_for_the_packed_encoder():
    with rejects("vit.merge", 2, "foreign"):
        VisionConfig(vit=replace(VIT, merge=2))
    with rejects("merge", 0, "size"):
        replace(VIT, merge=0)
    assert isinstance(encoder(), PackedViT)

"""Cross-attention: text reads images that are no part of its stream."""

import types

import pytest
import torch

from forge_core import SamplingConfig, Transformer, TransformerConfig, generate
from forge_core.flops import flops_per_token
from forge_core.interp import attention_weights
from forge_testing.problems import rejects
from forge_vlm import VLM, FusionConfig, ModalityConfig, VisionConfig, VLMConfig
from forge_vlm.fusion import CrossAttentionConfig
from forge_vlm.fusion.cross_attention import visible_images
from forge_vlm.vision import ViTConfig

pytestmark = pytest.mark.lane("test")

IMAGE = 63
SIZES = dict(
    vocab_size=64, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=32, init_std=0.1
)


def config(sees="group", qk_norm=False, **options):
    cross = CrossAttentionConfig(layers=(0, 1), sees=sees, qk_norm=qk_norm)
    vit = ViTConfig(image_size=8, patch_size=4, dim=8, num_layers=1, num_heads=2)
    return VLMConfig(
        **{
            **SIZES,
            "vision": VisionConfig(vit=vit),
            "modalities": {"image": ModalityConfig(first_id=IMAGE)},
            "fusion": FusionConfig("cross_attention", cross_attention=cross),
            **options,
        }
    )


def opened(model, gate=0.7):
    """Gates that let images in: at 0, where they begin, no image has a say."""
    for name, parameter in model.named_parameters():
        if name.endswith("_gate"):
            torch.nn.init.constant_(parameter, gate)
    return model


def rows():
    """Text, an image, text, two images side by side, text; and an image between texts."""
    tokens = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    for row, place in ((0, 2), (0, 6), (0, 7), (1, 4)):
        tokens[row, place] = IMAGE
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return tokens, images


def ragged(values, *counts):
    """What a batch holds: entries of all rows, and where those of each row begin."""
    return types.SimpleNamespace(values=values, row_offsets=torch.tensor([0, *counts]).cumsum(0))


@pytest.mark.parametrize(
    ("sees", "wanted"),
    [
        ("last", ["", "", "0", "0", "0", "0", "1", "2", "2", "", "3", "3"]),
        ("group", ["", "", "0", "0", "0", "0", "1", "12", "12", "", "3", "3"]),
        ("all", ["", "", "0", "0", "0", "0", "01", "012", "012", "", "3", "3"]),
    ],
)
def test_a_token_sees_images_before_it_in_its_document(sees, wanted):
    here = torch.zeros(1, 12, dtype=torch.bool)
    here[0, [2, 6, 7, 10]] = True
    documents = torch.tensor([[0] * 9 + [1] * 3])
    first, stop = visible_images(here, documents, sees)
    found = ["".join(map(str, range(a, b))) for a, b in zip(first[0].tolist(), stop[0].tolist())]
    assert found == wanted
    with_row_before = visible_images(
        torch.cat([here.flip(1), here]), torch.cat([documents, documents]), sees
    )
    assert (with_row_before[0][1] - 4).tolist() == first[0].tolist()


@pytest.mark.parametrize("sees", ["last", "group", "all"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_block_is_attention_token_by_token(sees, qk_norm):
    """Against a loop over tokens, heads and the keys of the images that each one sees."""
    model, (tokens, images) = opened(VLM(config(sees, qk_norm)).eval()), rows()
    block, given = model.layers["cross_1"], {}
    block.register_forward_hook(lambda m, args, out: given.update(x=args[0], out=out))
    model(tokens, images=images)
    x, features = given["x"], model.adapter(model.vision(images=images))  # (N, T, D)
    first, stop = visible_images(tokens == IMAGE, None, sees)
    mix, wanted = block.mixer, torch.empty_like(x)
    for row in range(2):
        for t in range(12):
            keys = features[first[row, t] : stop[row, t]].flatten(0, 1)
            out = x[row, t]
            if len(keys):
                q = mix.q_proj(block.mixer_norm(out)).unflatten(-1, (4, 4))
                k, v = (p(keys).unflatten(-1, (2, 4)) for p in (mix.k_proj, mix.v_proj))
                if qk_norm:
                    q, k = mix.q_norm(q), mix.k_norm(k)
                heads = [(q[h] @ k[:, h // 2].T / 2).softmax(0) @ v[:, h // 2] for h in range(4)]
                out = out + torch.tanh(block.mixer_gate) * mix.o_proj(torch.cat(heads))
                fed = block.feed_forward(block.feed_forward_norm(out))
                out = out + torch.tanh(block.feed_forward_gate) * fed
            wanted[row, t] = out
    torch.testing.assert_close(given["out"], wanted, rtol=1e-5, atol=1e-6)
    blind = first == stop
    assert torch.equal(given["out"][blind], x[blind])


@pytest.mark.parametrize("sees", ["last", "group"])
def test_weights_on_images_are_softmax_token_by_token_and_the_same_with_a_cache(sees):
    model, (tokens, images) = opened(VLM(config(sees, qk_norm=True)).eval()), rows()
    block, given = model.layers["cross_1"], {}
    block.register_forward_hook(lambda m, args, out: given.update(x=args[0]))
    with attention_weights(model) as weights:
        model(tokens, images=images)
    found = weights["layers.cross_1.mixer"]  # (B, H, S, M), M of the row with most images
    assert found.shape == (2, 4, 12, 12)
    features = model.adapter(model.vision(images=images))  # (N, T, D)
    first, stop = visible_images(tokens == IMAGE, None, sees)
    mix, wanted = block.mixer, torch.zeros_like(found)
    for row, begins in ((0, 0), (1, 3)):
        for t in range(12):
            if first[row, t] == stop[row, t]:
                continue
            keys = features[first[row, t] : stop[row, t]].flatten(0, 1)
            q = mix.q_norm(mix.q_proj(block.mixer_norm(given["x"][row, t])).unflatten(-1, (4, 4)))
            k = mix.k_norm(mix.k_proj(keys).unflatten(-1, (2, 4)))
            at = 4 * (int(first[row, t]) - begins)
            for h in range(4):
                wanted[row, h, t, at : at + len(keys)] = (q[h] @ k[:, h // 2].T / 2).softmax(0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    cache = model.new_cache(12)
    with attention_weights(model) as weights:
        model(tokens[:, :8], images=images, cache=cache)
        model(tokens[:, 8:9], cache=cache)
    late = weights["layers.cross_1.mixer"]
    torch.testing.assert_close(late, wanted[:, :, 8:9], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["joint_decoder", "mixture_of_transformers", "moma"])
def test_weights_of_other_fusions_are_those_of_all_tokens(name):
    model = VLM(config(fusion=FusionConfig(name))).eval()
    tokens = torch.tensor([[1, *[IMAGE] * 4, 2], [*[IMAGE] * 4, 3, 4]])
    with attention_weights(model) as weights:
        model(tokens, images=rows()[1][:2])
    assert list(weights) == ["layers.0.mixer", "layers.1.mixer"]
    for found in weights.values():
        torch.testing.assert_close(found.sum(-1), torch.ones(2, 4, 6))
        assert not found.triu(1).any()


def test_weights_of_the_text_model_have_its_names_and_closed_gates_its_logits():
    model, text, (tokens, images) = VLM(config()), Transformer(TransformerConfig(**SIZES)), rows()
    names = set(text.state_dict())
    assert names < set(model.state_dict())
    text.load_state_dict({n: v for n, v in model.state_dict().items() if n in names})
    wanted = text(tokens)
    assert torch.equal(model(tokens), wanted)
    assert torch.equal(model(tokens, images=images), wanted)
    assert not torch.equal(opened(model)(tokens, images=images), wanted)
    assert list(model.layers) == ["cross_0", "0", "cross_1", "1"]


def test_gates_begin_closed_and_take_the_first_step():
    model, (tokens, images) = VLM(config()), rows()
    model(tokens, images=images).square().sum().backward()
    for key in ("cross_0", "cross_1"):
        assert float(model.layers[key].mixer_gate.detach()) == 0.0
        assert float(model.layers[key].mixer_gate.grad) != 0.0
        assert float(model.layers[key].feed_forward_gate.grad) != 0.0


def test_an_image_changes_only_later_tokens():
    model, (tokens, images) = opened(VLM(config()).eval()), rows()
    other = images.clone()
    other[1] = images[1].flip(-1)  # the first of two side by side in the first row
    moved = (model(tokens, images=images) - model(tokens, images=other)).abs().amax(-1) > 1e-6
    assert moved[0].tolist() == [False] * 6 + [True] * 6
    assert not moved[1].any()


def test_the_stream_is_only_text():
    """The token of an image has its embedding, whatever the image."""
    model, (tokens, images) = opened(VLM(config())), rows()
    given = []
    model.layers["cross_0"].register_forward_pre_hook(lambda m, args: given.append(args[0]))
    model(tokens, images=images)
    assert torch.equal(given[0], model.embedding(tokens))


def test_each_sequence_gives_what_it_gives_in_a_batch():
    model, (tokens, images) = opened(VLM(config()).eval()), rows()
    both = model(tokens, images=ragged(images, 3, 1))
    for row, own in ((0, images[:3]), (1, images[3:])):
        alone = model(tokens[row : row + 1], images=own)
        torch.testing.assert_close(alone, both[row : row + 1], rtol=1e-5, atol=1e-6)


def test_documents_of_a_packed_row_see_their_own_images():
    model, (tokens, images) = opened(VLM(config()).eval()), rows()
    apart = model(tokens, images=images)
    packed = model(
        tokens.flatten()[None],
        document_ids=torch.arange(2).repeat_interleave(12)[None],
        images=images,
    )
    torch.testing.assert_close(packed.unflatten(1, (2, 12))[0], apart, rtol=1e-5, atol=1e-6)


def test_a_row_without_images_is_the_text_models_and_gradients_are_exact():
    """Text beside images, and a batch of text whose blocks run on a dummy: times 0."""
    model, (tokens, images) = opened(VLM(config())), rows()
    tokens[1, 4] = 5
    alone = model(tokens[1:])
    mixed = model(tokens, images=ragged(images[:3], 3, 0))
    torch.testing.assert_close(mixed[1:], alone, rtol=1e-5, atol=1e-6)
    mixed.square().sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for out in (model(tokens[:1], images=images[:3]), alone):
        out.square().sum().backward()  # the sum over rows that know nothing of each other
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)
    model.zero_grad()
    out = model(tokens[1:], images=images[:0])
    assert torch.equal(out, alone)
    out.sum().backward()
    inside = [
        p for n, p in model.named_parameters() if "cross_" in n or n.startswith(("vision", "adap"))
    ]
    assert all(float(p.grad.abs().max()) == 0.0 for p in inside)


def test_generation_encodes_once_and_equals_a_full_forward():
    model, (tokens, images) = opened(VLM(config()).eval()), rows()
    with torch.no_grad():  # no new token is that of an image
        model.lm_head.weight[IMAGE] = -10 * model.lm_head.weight.mean(0)
    calls = {"vision": 0, "k_proj": 0, "q_proj": 0}
    count(model.vision, calls, "vision")
    for name in ("k_proj", "q_proj"):
        count(getattr(model.layers["cross_1"].mixer, name), calls, name)
    prompts = [tokens[0, :9], tokens[1], torch.tensor([1, 2, 3])]
    new = generate(model, prompts, 6, SamplingConfig(temperature=0.0), extras={"images": images})
    assert calls == {"vision": 1, "k_proj": 1, "q_proj": 6}
    for row, own in ((0, images[:3]), (1, images[3:]), (2, None)):
        whole, given = prompts[row], {} if own is None else {"images": own}
        for step in range(6):
            with torch.no_grad():
                chosen = model(whole[None], **given)[0, -1].argmax()
            assert chosen == new[row, step]
            whole = torch.cat([whole, chosen[None]])


def count(module, calls, name):
    module.register_forward_hook(lambda *a: calls.update({name: calls[name] + 1}))


def test_a_new_document_after_cached_tokens_sees_no_image_of_the_old_one():
    model, (tokens, images) = opened(VLM(config()).eval()), rows()
    cache = model.new_cache(16)
    ids = torch.zeros(1, 9, dtype=torch.int64)
    with torch.no_grad():
        model(tokens[:1, :9], document_ids=ids, images=images[:3], cache=cache)
        more = torch.tensor([[3, 4, 5]])
        found = model(more, document_ids=torch.tensor([[0, 1, 1]]), cache=cache)
        whole = model(
            torch.cat([tokens[:1, :9], more], 1),
            document_ids=torch.tensor([[0] * 10 + [1] * 2]),
            images=images[:3],
        )
    torch.testing.assert_close(found, whole[:, 9:], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found[:, 1:], model(more)[:, 1:])  # other tokens before
    torch.testing.assert_close(found[:, 1:], model(more[:, 1:]), rtol=1e-5, atol=1e-6)


def test_operations_of_a_token_are_those_of_the_text_queries_and_feed_forward():
    text, model = Transformer(TransformerConfig(**SIZES)), VLM(config(images_per_row=0))
    more = 2 * (2 * 2 * 16 * 16 + 2 * 3 * 16 * model.config.resolved_hidden_dim)
    assert flops_per_token(model, 8) == pytest.approx(flops_per_token(text, 8) + 3 * more)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"every_n_layers": 4}, (3, 7, 11)),
        ({"every_n_layers": 1}, tuple(range(12))),
        ({"layers": (8, 3)}, (3, 8)),
    ],
)
def test_positions_of_blocks(options, where):
    assert CrossAttentionConfig(**options).before(12) == where


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("every_n_layers", 3, "range"),
        ("layers", (0, 2), "range"),
        ("layers", (0, 0), "duplicate"),
        ("every_n_layers", 0, "size"),
        ("sees", "next", "unknown"),
        ("qk_norm", 1, "type"),
    ],
)
def test_impossible_positions_of_blocks_are_rejected(key, value, code):
    table = "fusion.cross_attention." if code == "range" else ""
    with rejects(f"{table}{key}", value, code):
        options = CrossAttentionConfig(**{key: value})
        config(fusion=FusionConfig("cross_attention", cross_attention=options))


@pytest.mark.parametrize(
    ("options", "key", "value", "code"),
    [
        (
            {"positions": "text_preserving"},
            *("positions", "text_preserving", "cross_attention"),
        ),
        (
            {"fusion": FusionConfig("cross_attention"), "num_layers": 1},
            *("fusion.cross_attention.every_n_layers", 2, "range"),
        ),
        ({"input_only_ids": -1}, "input_only_ids", -1, "range"),
        ({"input_only_ids": 2, "tie_embeddings": True}, "input_only_ids", 2, "excludes"),
    ],
)
def test_impossible_arguments_are_rejected(options, key, value, code):
    with rejects(key, value, code):
        config(**options)


def test_keys_of_another_fusion_are_rejected():
    with rejects("cross_attention.sees", "all", "foreign"):
        FusionConfig("joint_decoder", cross_attention=CrossAttentionConfig(sees="all"))


def test_media_that_do_not_fit_are_rejected():
    model, (tokens, images) = VLM(config()).eval(), rows()
    with rejects("images", 3, "number"):
        model(tokens, images=images[:3])
    cache = model.new_cache(32)
    model(tokens, images=images, cache=cache)
    with rejects("cache", 12, "images"):
        model(tokens, images=images, cache=cache)
    with rejects("images", [2, 2], "by_row"):
        model(tokens, images=ragged(images, 2, 2))  # the third of the first row was seen by no one
    with rejects("document_ids", (2, 6), "shape"):
        model(tokens, images=images, document_ids=torch.zeros(2, 6))


def test_ids_beyond_the_vocabulary_are_embedded_and_never_predicted():
    options = {"input_only_ids": 2, "modalities": {"image": ModalityConfig(first_id=65)}}
    model, (tokens, images) = opened(VLM(config(**options))), rows()
    tokens[tokens == IMAGE] = 65
    assert model.embedding.weight.shape == (66, 16)
    assert model(tokens, images=images).shape == (2, 12, 64)

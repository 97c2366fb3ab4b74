"""MoMa: feed-forwards of experts in groups by modality, against a slow float64 oracle of each token."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from forge_core import SamplingConfig, TokenContext, Transformer, generate
from forge_testing.problems import rejects
from forge_vlm import VLM, FusionConfig, ModalityConfig, VisionConfig, VLMConfig
from forge_vlm.experimental import MoMa, MoMaSteps, set_routing_step
from forge_vlm.experimental.routing import gumbel_difference
from forge_vlm.fusion import MoMaConfig, axes_problems
from forge_vlm.vision import ViTConfig

pytestmark = pytest.mark.lane("test")

SIZES = dict(vocab_size=64, dim=16, num_layers=2, num_heads=4, max_seq_len=64)
MODALITIES = {
    "image": ModalityConfig(first_id=63),
    "speech": ModalityConfig(first_id=40, num_ids=12, discrete=True),
}
NAMES = {0: "text", 1: "image", 2: "speech"}


def config(modalities=MODALITIES, **options):
    vit = ViTConfig(image_size=8, patch_size=4, dim=8, num_layers=1, num_heads=2)
    return VLMConfig(
        **SIZES,
        vision=VisionConfig(vit=vit),
        modalities=modalities,
        fusion=FusionConfig("moma", moma=MoMaConfig(**options)),
    )


def layer_of(seed=0, std=0.5, **options):
    layer = VLM(config(**options)).layers["0"].feed_forward
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, std, generator=generator)
    return layer


def batch(rows=3, size=10, seed=3):
    """A stream and its context: modalities in any order, two documents in a row, padding anywhere."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, SIZES["dim"], generator=generator)
    ids = torch.randint(0, 3, (rows, size), generator=generator)
    documents = torch.zeros_like(ids)
    documents[1, 6:] = 1
    documents[0, :2], documents[2, 4:6], documents[2, 6:] = -1, -1, 1
    ids[documents < 0] = -1
    return x, TokenContext(modality_ids=ids, document_ids=documents)


# ------------------------------------------------------------ the oracle


def expert64(group, e, x):
    w = {n: p.double() for n, p in group.experts.each[str(e)].named_parameters()}
    gate = w["gate_proj.weight"] @ x
    return w["down_proj.weight"] @ (gate * gate.sigmoid() * (w["up_proj.weight"] @ x))


def summed(gates, outputs, normalize):
    """The weighted sum of one token's experts; nothing without any."""
    total = sum(gates) if normalize else 1.0
    return sum(g / total * out for g, out in zip(gates, outputs))


def by_tokens(layer, x, ids):
    """Token choice, of one token after another."""
    out, c = torch.zeros_like(x), layer.options
    for b, t in torch.nonzero(ids >= 0).tolist():
        group = layer.groups[NAMES[int(ids[b, t])]]
        chances = (group.router.weight.double() @ x[b, t]).softmax(0)
        chosen = sorted(range(group.num), key=lambda e: (-chances[e].item(), e))[: c.top_k]
        out[b, t] = summed(
            [chances[e] for e in chosen], [expert64(group, e, x[b, t]) for e in chosen], c.normalize
        )
    return out


def picks_of(layer, x, ids, documents, noise=None):
    """{(row, token, expert): gate} of what experts take, one expert and one sequence after another."""
    c, found = layer.options, {}
    for number, name in NAMES.items():
        group, sequences = layer.groups[name], {}
        for b, t in torch.nonzero(ids == number).tolist():
            key = (b, int(documents[b, t])) if c.scope == "sequence" else None
            sequences.setdefault(key, []).append((b, t))
        for tokens in sequences.values():
            take = min(len(tokens), math.ceil(c.capacity_factor * len(tokens) / group.num))
            for e in range(group.num):
                gates = {}
                for b, t in tokens:
                    logit = group.router.weight[e].double() @ x[b, t]
                    if noise is not None:
                        logit = logit + c.gumbel_noise * noise(name, b, t, e)
                    gates[b, t] = logit.sigmoid()
                best = sorted(tokens, key=lambda place: (-gates[place].item(), place))[:take]
                found |= {(b, t, e): gates[b, t] for b, t in best}
    return found


def by_experts(layer, x, ids, picks):
    out = torch.zeros_like(x)
    for b, t in torch.nonzero(ids >= 0).tolist():
        group = layer.groups[NAMES[int(ids[b, t])]]
        mine = {e: g for (row, token, e), g in picks.items() if (row, token) == (b, t)}
        outputs = [expert64(group, e, x[b, t]) for e in mine]
        out[b, t] = summed(list(mine.values()), outputs, layer.options.normalize)
    return out


def close(found, wanted):
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error < 1e-5


# ------------------------------------------------------------ against it


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_token_choice_is_the_oracles(normalize, training):
    layer = layer_of(normalize=normalize, top_k=2, experts={"image": 3, "speech": 5})
    x, ctx = batch()
    layer.train(training)
    close(layer(x, ctx), by_tokens(layer, x.double(), ctx.modality_ids))
    assert not layer(x, ctx)[ctx.modality_ids < 0].any()


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
@pytest.mark.parametrize("capacity_factor", [1.0, 2.5])
def test_expert_choice_is_the_oracles(scope, capacity_factor):
    layer = layer_of(
        router="expert_choice",
        scope=scope,
        capacity_factor=capacity_factor,
        normalize=capacity_factor > 2,
        experts={"image": 3},
    ).train()
    x, ctx = batch()
    picks = picks_of(layer, x.double(), ctx.modality_ids, ctx.document_ids)
    close(layer(x, ctx), by_experts(layer, x.double(), ctx.modality_ids, picks))


def test_padding_does_not_enter_capacities():
    """The same tokens without padding get the same experts."""
    layer = layer_of(router="expert_choice", scope="micro_batch").train()
    x, ctx = batch()
    real = ctx.modality_ids >= 0
    alone = TokenContext(modality_ids=ctx.modality_ids[real][None])
    torch.testing.assert_close(layer(x[real][None], alone)[0], layer(x, ctx)[real])


def test_noise_is_a_stream_of_seed_step_micro_batch_layer_and_position():
    layer = layer_of(router="expert_choice", gumbel_noise=0.7).train()
    x, ctx = batch()
    with pytest.raises(RuntimeError, match="set_routing_step"):
        layer(x, ctx)
    outs = []
    for stream in ((0, 5, 0), (0, 6, 0), (0, 5, 1), (1, 5, 0), (0, 5, 0)):
        set_routing_step(layer, seed=stream[0], step=stream[1], micro_batch=stream[2])
        drawn = {
            name: gumbel_difference(torch.arange(x.shape[0] * x.shape[1]), 4, group._stream(0))
            for name, group in layer.groups.items()
        }
        fresh = TokenContext(modality_ids=ctx.modality_ids, document_ids=ctx.document_ids)
        picks = picks_of(
            layer,
            x.double(),
            ctx.modality_ids,
            ctx.document_ids,
            lambda name, b, t, e, drawn=drawn: drawn[name][b * x.size(1) + t, e].double(),
        )
        outs.append(layer(x, fresh))
        close(outs[-1], by_experts(layer, x.double(), ctx.modality_ids, picks))
    assert torch.equal(outs[0], outs[4])
    assert all(not torch.equal(outs[0], other) for other in outs[1:4])


def test_noise_is_logistic():
    """The difference of two Gumbel variates has mean 0 and variance pi^2 / 3; streams are independent."""
    one = gumbel_difference(torch.arange(4000), 4, (0, 1, 2))
    other = gumbel_difference(torch.arange(4000), 4, (0, 2, 2))
    assert abs(float(one.mean())) < 0.05
    assert abs(float(one.var()) - math.pi**2 / 3) < 0.15
    assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 0.03
    assert abs(float(torch.corrcoef(one.T)[0, 1])) < 0.06


def test_a_recomputation_takes_the_same_tokens():
    layer = layer_of(router="auxiliary_router", gumbel_noise=1.0).train()
    set_routing_step(layer, seed=0, step=1)
    x, ctx = batch()
    grads = []
    for recompute in (False, True):
        fresh = TokenContext(modality_ids=ctx.modality_ids, document_ids=ctx.document_ids)
        layer.zero_grad()
        run = (lambda *a: checkpoint(layer, *a, use_reentrant=False)) if recompute else layer
        run(x, fresh).square().sum().backward()
        grads.append({n: p.grad.clone() for n, p in layer.named_parameters()})
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


# ------------------------------------------------------------ the auxiliary router


def test_the_auxiliary_router_learns_the_experts_choice_without_side_effects():
    layer = layer_of(router="auxiliary_router", std=0.2).train()
    x, ctx = batch()
    layer(x.requires_grad_(), ctx).sum().backward()
    of_x, x = x.grad, x.detach()
    mine = {n: p.grad.clone() for n, p in layer.named_parameters()}
    picks = picks_of(layer, x.double(), ctx.modality_ids, ctx.document_ids)
    for number, name in NAMES.items():  # its gradient is that of the mean of the BCE
        group = layer.groups[name]
        places = torch.nonzero(ctx.modality_ids == number).tolist()
        wanted = torch.tensor([[float((b, t, e) in picks) for e in range(4)] for b, t in places])
        guess = group.auxiliary(x[ctx.modality_ids == number]).sigmoid()
        loss = -(wanted * guess.log() + (1 - wanted) * (1 - guess).log()).mean()
        for parameter, grad in zip(
            group.auxiliary.parameters(), torch.autograd.grad(loss, group.auxiliary.parameters())
        ):
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-6)
    # the others' gradients are those without it
    plain = layer_of(router="expert_choice", std=0.2).train()
    plain.load_state_dict({n: v for n, v in layer.state_dict().items() if "auxiliary" not in n})
    plain(x.requires_grad_(), batch()[1]).sum().backward()
    assert torch.equal(x.grad, of_x)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, mine[name]), name


@pytest.mark.slow
def test_a_trained_auxiliary_router_takes_nearly_what_experts_take():
    layer = layer_of(router="auxiliary_router", scope="micro_batch", std=0.5).train()
    x, ctx = batch(rows=8, size=16)
    optimizer = torch.optim.Adam(
        [p for n, p in layer.named_parameters() if "auxiliary" in n], lr=0.02
    )
    wanted = layer(x, batch(rows=8, size=16)[1]).detach()
    for _ in range(150):
        optimizer.zero_grad()
        layer(x, ctx).sum().backward()
        optimizer.step()
    found = layer.eval()(x, ctx)
    same = torch.isclose(found, wanted, rtol=1e-3, atol=1e-4).all(-1)
    assert same.float().mean() > 0.9


@pytest.mark.parametrize("router", ["token_choice", "auxiliary_router"])
def test_F72_routing_depends_neither_on_other_sequences_nor_padding_nor_the_future(router):
    """What generates: each token's output is a function of that token alone."""
    layer = layer_of(router=router, experts={"image": 3}).eval()
    x, ctx = batch()
    whole = layer(x, ctx)
    for row in range(3):
        for end in range(1, x.size(1) + 1):
            ids = ctx.modality_ids[row : row + 1, :end]
            alone = layer(x[row : row + 1, :end], TokenContext(modality_ids=ids))
            torch.testing.assert_close(alone[0], whole[row, :end])
    real = ctx.modality_ids[1] >= 0
    front = torch.full((4,), -1)
    padded = TokenContext(modality_ids=torch.cat([front, ctx.modality_ids[1], front])[None])
    wide = torch.cat([torch.randn(4, SIZES["dim"]), x[1], torch.randn(4, SIZES["dim"])])[None]
    torch.testing.assert_close(layer(wide, padded)[0, 4:-4][real], whole[1][real])


def test_bare_expert_choice_neither_evaluates_nor_generates():
    model = VLM(config(router="expert_choice"))
    tokens = torch.randint(1, 40, (2, 6))
    model.train()(tokens)
    with rejects("fusion.moma.router", "expert_choice", "evaluation"):
        model.eval()(tokens)
    with pytest.raises(ValueError, match=r"layers\.0\.feed_forward"):
        generate(model, tokens, 2)


@pytest.mark.lane("quick")
@pytest.mark.parametrize("router", ["token_choice", "auxiliary_router"])
def test_generation_equals_full_forwards(router):
    model = VLM(config(router=router)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator).add_(parameter.ndim == 1)
        model.lm_head.weight[63] = -10 * model.lm_head.weight.mean(0)
    images = torch.randn(1, 3, 8, 8, generator=generator)
    prompts = [torch.tensor([1, 63, 63, 63, 63, 44]), torch.tensor([7, 42])]
    new = generate(model, prompts, 12, SamplingConfig(temperature=0.0), extras={"images": images})
    for row, own in ((0, {"images": images}), (1, {})):
        whole = prompts[row]
        for step in range(12):
            with torch.no_grad():
                chosen = model(whole[None], **own)[0, -1].argmax()
            assert chosen == new[row, step]
            whole = torch.cat([whole, chosen[None]])


# ------------------------------------------------------------ losses, ranks, cost


def test_the_balance_loss_is_attached_once_and_is_the_mean_over_a_groups_tokens():
    layer = layer_of(balance_loss=0.5).train()
    x, ctx = batch()
    (layer(x, ctx) * 0).sum().backward()
    group, tokens = layer.groups["text"], x[ctx.modality_ids == 0]
    loss = balance_of(group, tokens) / len(tokens)
    wanted = torch.autograd.grad(loss, group.router.weight)[0]
    torch.testing.assert_close(group.router.weight.grad, wanted)


def balance_of(group, tokens):
    """0.5 times the balance loss, summed over the tokens of a group in a micro-batch."""
    chances = group.router(tokens).softmax(-1)
    counts = torch.zeros(4).index_add_(
        0, chances.topk(2, -1).indices.flatten(), torch.ones(2 * len(tokens))
    )
    return 0.5 * 4 * (counts / counts.sum() * chances.sum(0)).sum()


@pytest.mark.parametrize("router", ["token_choice", "auxiliary_router"])
def test_F147_router_losses_give_each_token_of_a_group_one_weight(router):
    """In micro-batches of rows with few and with many tokens of a group."""
    options = {"balance_loss": 0.5} if router == "token_choice" else {}
    layer = layer_of(router=router, std=0.2, **options).train()
    x, ctx = batch()
    ids = ctx.modality_ids
    assert (ids[0] == 1).sum() * 2 != (ids[1:] == 1).sum()  # not as many as its rows
    tokens = torch.where(ids == 1, 63, torch.where(ids == 2, 40, 1))
    counts = layer.count_tokens(tokens, ctx.document_ids)
    assert counts == {name: int((ids == number).sum()) for number, name in NAMES.items()}
    steps = MoMaSteps([layer], seed=0)
    steps.begin(step=1, first=0)
    assert steps.count_tokens(tokens, ctx.document_ids) == tuple(counts.values())
    parts = [slice(0, 1), slice(1, 3)]
    for part in parts:
        out = layer(
            x[part], TokenContext(modality_ids=ids[part], document_ids=ctx.document_ids[part])
        )
        steps.set_tokens(tuple(counts.values()))  # known after the first forward
        (0 * out).sum().backward()
    for number, name in NAMES.items():
        group, total = layer.groups[name], 0.0
        for part in parts:
            here = ids[part] == number
            if router == "token_choice":
                total = total + balance_of(group, x[part][here])
                continue
            picks = picks_of(layer, x[part].double(), ids[part], ctx.document_ids[part])
            picked = [
                [float((b, t, e) in picks) for e in range(4)] for b, t in here.nonzero().tolist()
            ]
            guess, chosen = group.auxiliary(x[part][here]).sigmoid(), torch.tensor(picked)
            total = total - (chosen * guess.log() + (1 - chosen) * (1 - guess).log()).sum() / 4
        trained = group.router if router == "token_choice" else group.auxiliary
        wanted = torch.autograd.grad(total / counts[name], list(trained.parameters()))
        for parameter, grad in zip(trained.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("router", ["token_choice", "expert_choice", "auxiliary_router"])
def test_groups_without_tokens_run_and_have_gradients_of_zero(router):
    layer = layer_of(router=router).train()
    x = batch()[0]
    for ctx in (TokenContext(), TokenContext(modality_ids=torch.full(x.shape[:2], -1))):
        layer.zero_grad()
        out = layer(x, ctx)
        out.sum().backward()
        assert torch.isfinite(out).all()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            if "groups.image" in name or ctx.modality_ids is not None:
                assert not parameter.grad.any(), name


def test_experts_come_from_a_factory():
    """Experts as forge_moe's are called: stacks of matrices, rows sorted by expert and counts."""
    made = []

    class Stack(torch.nn.Module):
        def __init__(self, num):
            super().__init__()
            self.up_proj = torch.nn.Parameter(torch.randn(num, 16, 8))
            self.down_proj = torch.nn.Parameter(torch.randn(num, 8, 16))

        def forward(self, rows, counts):
            parts = zip(rows.split(counts.tolist()), self.up_proj, self.down_proj)
            return torch.cat([(part @ up).relu() @ down for part, up, down in parts])

    def experts(group, num):
        made.append((group, num))
        return Stack(num)

    model = VLM(config(experts={"speech": 2}), experts=experts)
    assert made == [("text", 4), ("image", 4), ("speech", 2)] * 2
    layer = model.layers["0"].feed_forward
    # router and two experts of 2 * 16 * 8 weights
    assert layer.flops_per_token(8) == 2 * 4 * 16 + 2 * 2 * 2 * 16 * 8
    x, ctx = batch()
    assert layer(x, ctx)[ctx.modality_ids >= 0].any(-1).all()


def test_flops_of_token_choice_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    layer = layer_of(top_k=2).eval()
    x = batch()[0]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x, TokenContext())
    assert counter.get_total_flops() == x.shape[0] * x.shape[1] * layer.flops_per_token(10)


def test_attention_is_shared_and_has_the_names_of_a_text_model():
    c = config()
    model, text = VLM(c), Transformer(c)
    own = {n for n in text.state_dict() if ".feed_forward." not in n}
    assert own <= set(model.state_dict())
    assert isinstance(model.layers["1"].feed_forward, MoMa)


@pytest.mark.parametrize(
    ("options", "key", "value", "code"),
    [
        ({"router": "best"}, "router", "best", "unknown"),
        ({"scope": "row"}, "scope", "row", "unknown"),
        ({"top_k": 1}, "top_k", 1, "normalize"),
        ({"top_k": 3, "num_experts": 2}, "top_k", 3, "above_experts"),
        ({"gumbel_noise": 1.0}, "gumbel_noise", 1.0, "foreign"),
        ({"balance_loss": -1.0}, "balance_loss", -1.0, "range"),
        ({"router": "expert_choice", "top_k": 1}, "top_k", 1, "foreign"),
        ({"router": "expert_choice", "capacity_factor": 0}, "capacity_factor", 0, "range"),
        ({"experts": {"image": 0}}, "experts.image", 0, "size"),
        ({"experts": {"smell": 2}}, "fusion.moma.experts.smell", 2, "unknown"),
        ({"share": {"image": "smell"}}, "fusion.moma.share", {"image": "smell"}, "unknown"),
    ],
)
def test_unsupported_settings_are_rejected(options, key, value, code):
    with rejects(key, value, code):
        config(**options)


def test_experts_have_the_shape_of_a_built_in_feed_forward():
    with rejects("feed_forward", "mine:net", "built_in"):
        replace(config(), feed_forward="mine:net")


@pytest.mark.parametrize(
    ("name", "axes", "problems"),
    [
        ("moma", {"cp": 2}, [("cp", 2, "bidirectional"), ("cp", 2, "router")]),
        (
            "moma",
            {"ep": 2, "tp": 4},
            [("ep", 2, code) for code in ("tp", "feed_forward", "divides")],
        ),
        ("mixture_of_transformers", {"ep": 2}, [("ep", 2, "fusion")]),
        ("joint_decoder", {"ep": 2, "tp": 2}, []),
    ],
)
def test_axes_that_a_fusion_cannot_be_computed_on(name, axes, problems):
    moma = SimpleNamespace(router="expert_choice", share={}, experts={}, num_experts=3)
    fusion = SimpleNamespace(name=name, moma=moma)
    config = SimpleNamespace(
        bidirectional="image", fusion=fusion, feed_forward="other", modalities={}
    )
    found = axes_problems(config, **axes, experts=("swiglu",))
    assert [(p.key, p.value, p.code) for p in found] == problems

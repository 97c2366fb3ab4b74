"""Points of a model against transformers, against float64 by hand, and against the model itself."""

import copy

import pytest
import torch
from torch import nn

from forge_core import AttentionSpec, Transformer, TransformerConfig
from forge_core.interp import ActivationStore, intervene, points_of
from forge_core.model import MLAConfig, MTPConfig
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

SIZES = dict(vocab_size=64, dim=16, num_layers=3, num_heads=4, num_kv_heads=2, init_std=0.3)
TOKENS = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(0))
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])
MLA = dict(
    mixer="mla",
    mla=MLAConfig(
        kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5
    ),
    num_kv_heads=None,
    head_dim=None,
)
CONFIGS = {
    "llama": {},
    "documents": {},
    "post_norm": {"block": "post_norm"},
    "sandwich": {"block": "sandwich", "attention": AttentionSpec(softcap=1.5, window=4)},
    "sinks": {"attention": AttentionSpec(sinks=True)},
    "scaled": {"residual_scale": 0.22},
}


def build(name="llama", **more):
    model = Transformer(TransformerConfig(**{**SIZES, **CONFIGS.get(name, {}), **more}))
    for path, parameter in model.named_parameters():
        if path.endswith("sinks"):
            nn.init.normal_(parameter)
    return model.eval()


def call(model, name="llama"):
    return model(TOKENS, document_ids=DOCUMENTS if name == "documents" else None)


def everything(model, *patterns, name="llama", **options):
    store = ActivationStore(patterns or ["*"], **options)
    with store.watch(model):
        call(model, name)
    return store


@pytest.mark.parametrize("name", CONFIGS)
def test_points_fit_together_and_the_output_is_the_same(name):
    model = build(name)
    wanted = call(model, name)
    store = ActivationStore("*")
    with store.watch(model):
        assert torch.equal(call(model, name), wanted)
    assert store.names == list(points_of(model))
    for i in range(3):

        def at(point, i=i):
            return store[f"layers.{i}.{point}"]

        assert torch.equal(at("resid_mid"), at("resid_pre") + at("attn_out"))
        assert torch.equal(at("resid_post"), at("resid_mid") + at("mlp_out"))
        spec = model.layers[str(i)].mixer.spec
        q, k, v = (at(point).double() for point in ("q", "k", "v"))
        k, v = (t.repeat_interleave(2, dim=2) for t in (k, v))
        scores = torch.einsum("bshd,bthd->bhst", q, k) / 2  # D is 4
        torch.testing.assert_close(at("attn_scores").double(), scores, rtol=1e-5, atol=1e-6)
        product = torch.einsum("bhst,bthd->bshd", at("attn_weights").double(), v)
        torch.testing.assert_close(at("head_out").double(), product, rtol=1e-5, atol=1e-6)
        sums = at("attn_weights").sum(-1)
        assert (sums < 1).all() if spec.sinks else torch.allclose(sums, torch.ones(()))
        hidden = nn.functional.linear(
            at("mlp_hidden"), model.layers[str(i)].feed_forward.down_proj.weight
        )
        if name in ("llama", "documents", "sinks"):
            torch.testing.assert_close(hidden, at("mlp_out"))
    assert torch.equal(store["logits"], wanted)
    assert torch.equal(model.norm(store["layers.2.resid_post"]), store["final_norm"])
    assert "point" not in vars(model.layers["0"]), "the store has left"
    assert type(model.layers["0"].mixer.attend).__name__ == "LocalAttention"


def test_mla_has_its_own_widths():
    model = build(**MLA)
    store = everything(model, "layers.1.*")
    assert store["layers.1.q"].shape == (2, 11, 4, 10)
    assert store["layers.1.v"].shape == store["layers.1.head_out"].shape == (2, 11, 4, 5)
    product = torch.einsum("bhst,bthd->bshd", store["layers.1.attn_weights"], store["layers.1.v"])
    torch.testing.assert_close(store["layers.1.head_out"], product, rtol=1e-5, atol=1e-6)


NAMES = (
    ("model.embed_tokens", "embedding"),
    ("model.", ""),
    ("self_attn", "mixer"),
    ("mlp", "feed_forward"),
)
NORMS = (("input_layernorm", "mixer_norm"), ("post_attention_layernorm", "feed_forward_norm"))


def test_hidden_states_and_attentions_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, attn_implementation="eager",
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = build(hidden_dim=40, rope_theta=10_000.0, norm_eps=config.rms_norm_eps)
    weights = {}
    for name, value in theirs.state_dict().items():
        for old, new in (*NAMES, *NORMS):
            name = name.replace(old, new)
        weights[name] = value
    ours.load_state_dict(weights)
    store = everything(ours)
    with torch.no_grad():
        out = theirs(TOKENS, output_hidden_states=True, output_attentions=True)
    for i in range(3):
        torch.testing.assert_close(store[f"layers.{i}.resid_pre"], out.hidden_states[i])
        torch.testing.assert_close(store[f"layers.{i}.attn_weights"], out.attentions[i])
    torch.testing.assert_close(store["final_norm"], out.hidden_states[3])
    torch.testing.assert_close(store["logits"], out.logits)


@pytest.mark.parametrize(
    "point", ["resid_pre", "resid_mid", "attn_out", "head_out", "q", "attn_weights", "mlp_hidden"]
)
def test_patching_the_own_value_restores_the_logits(point):
    model, other = build(), TOKENS.flip(1)
    clean = call(model)
    store = everything(model, f"layers.1.{point}")
    with torch.no_grad(), intervene(model, {f"layers.1.{point}": lambda x, name: store[name]}):
        same = call(model)
        patched = model(other)
    tolerance = 1e-5 if point == "attn_weights" else 0.0  # computed from its definition
    torch.testing.assert_close(same, clean, rtol=0, atol=tolerance)
    assert not torch.allclose(patched, model(other))
    if point in ("resid_pre", "resid_mid"):
        assert torch.equal(call(model), clean), "all is as before"
    if point == "resid_pre":  # everything behind it is that of the clean run
        torch.testing.assert_close(patched, clean, rtol=0, atol=0)


def test_ablation_of_heads_equals_zeroed_weights():
    model = build()
    zeroed = copy.deepcopy(model)
    with torch.no_grad():
        zeroed.layers["1"].mixer.o_proj.weight[:, 4:12] = 0  # heads 1 and 2
        zeroed.layers["2"].feed_forward.down_proj.weight.zero_()
    keep = torch.tensor([1.0, 0, 0, 1])[:, None]
    changes = {"layers.1.head_out": lambda x, _: x * keep, "layers.2.mlp_out": lambda x, _: x * 0}
    with intervene(model, changes):
        assert torch.equal(call(model), call(zeroed))


@pytest.mark.parametrize("point", ["attn_weights", "attn_scores", "head_out", "resid_pre"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_change_in_place_is_a_change(point, mode):
    model = build()

    def in_place(x, _):
        x[:, 1] = 0
        return x

    changes = (in_place, lambda x, name: in_place(x.clone(), name))
    with mode():
        found = []
        for change in changes:
            with intervene(model, {f"layers.1.{point}": change}):
                found.append(call(model))
        assert torch.equal(*found)
        assert not torch.allclose(found[0], call(model), atol=1e-3)


def test_rows_are_those_of_tokens_whatever_is_named_first():
    model, positions = build(), torch.arange(11)[None]
    store = ActivationStore("*.resid_post", every=2)
    with store.watch(model):
        model(positions=positions, tokens=TOKENS)
    assert store.rows == 2
    assert store["layers.0.resid_post"].shape == (1, 11, 16)


def test_patterns_match_what_calls_without_mtp_reach():
    model = build(mtp=MTPConfig(num_modules=1))
    store = everything(model)
    assert "logits" in store.names
    assert not any(name.startswith("mtp") for name in store.names)
    ahead = ActivationStore(["layers.2.resid_post", "mtp.*.head_out"])
    with ahead.watch(model):
        model(TOKENS, next_tokens=TOKENS[:, None])
    assert ahead["mtp.0.block.mixer.head_out"].shape == (2, 11, 4, 4)
    refused = rejects("mtp.0.block.attn_out", ..., "not_reached")
    with refused, ActivationStore("mtp.*").watch(model):
        call(model)


def test_a_copy_has_the_attention_of_the_model():
    model = build()
    with intervene(model, {"*.attn_weights": lambda x, _: x * 0, "*.head_out": lambda x, _: x}):
        other = copy.deepcopy(model)
        assert not torch.allclose(call(model), call(other))
    assert torch.equal(call(other), call(model))


def test_watches_may_end_in_any_order():
    model = build()
    stores = [ActivationStore("*.attn_*") for _ in range(2)]
    watches = [store.watch(model) for store in stores]
    for watch in watches:
        watch.__enter__()
    call(model)
    watches[0].__exit__(None, None, None)
    call(model)
    watches[1].__exit__(None, None, None)
    call(model)
    assert [store.rows for store in stores] == [2, 4]
    assert not any("point" in vars(m) for m in model.modules())


def test_gradients_go_through_a_change():
    model = build()
    vector = torch.zeros(16, requires_grad=True)
    with intervene(model, {"layers.0.resid_post": lambda x, _: x + vector}):
        call(model)[0, -1, 5].backward()
    step = 1e-2 * torch.eye(16)[3]
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            with intervene(
                model.double(), {"layers.0.resid_post": lambda x, _, s=sign: x + s * step.double()}
            ):
                values.append(call(model)[0, -1, 5])
    slope = (values[0] - values[1]) / 2e-2
    torch.testing.assert_close(vector.grad[3].double(), slope, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("point", ["attn_scores", "attn_weights"])
def test_gradients_reach_queries_through_changed_attention(point):
    model = build()
    wanted, found = [], []
    for collect, change in ((wanted, None), (found, lambda x, _: x + 0)):
        model.zero_grad()
        with intervene(model, {"*." + point: change} if change else {}):
            call(model).square().sum().backward()
        collect += [p.grad.clone() for p in model.parameters()]
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_a_store_inside_of_a_change_sees_it_and_one_outside_does_not():
    model = build()
    inner, outer = ActivationStore("layers.1.*"), ActivationStore("layers.1.*")

    def half(x, _):
        return x / 2

    changes = {"layers.1.attn_weights": half, "layers.1.attn_out": half, "layers.1.resid_pre": half}
    with outer.watch(model), intervene(model, changes), inner.watch(model):
        call(model)
    assert torch.equal(inner["layers.1.resid_pre"], outer["layers.1.resid_pre"] / 2)
    assert torch.equal(inner["layers.1.attn_weights"], outer["layers.1.attn_weights"] / 2)
    assert torch.equal(inner["layers.1.attn_out"], outer["layers.1.attn_out"] / 2)
    assert not any("point" in vars(m) for m in model.modules())


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_compiled_block_is_rejected_by_name():
    model = build()
    model.layers["1"].compile(backend="eager")
    with rejects("layers.1.resid_pre", ..., "compiled", where="(layers.1)"):
        everything(model, "layers.1.resid_pre")
    everything(model, "layers.0.resid_pre")


class OfRanks:
    """The whole values of ranks, of which there is one."""

    def names(self, here):
        return here

    def check(self, name, place):
        pass


def test_a_change_of_what_ranks_share_has_no_gradient():
    model = build()
    changes = {"layers.0.mlp_out": lambda x, _: x}
    with (
        rejects("layers.0.mlp_out", ..., "gradient"),
        intervene(model, changes, whole=OfRanks()),
    ):
        model(TOKENS)


def test_wrong_points_and_changes_are_rejected():
    model = build()
    model.layers["1"]._compiled_call_impl = model.layers["1"].forward
    with rejects("layers.1.resid_pre", ..., "compiled", where="(layers.1)"):
        everything(model, "layers.1.resid_pre")
    model = build()
    with rejects("layers.0.resid_mide", ..., "not_found", where=" layers.0.resid_mid"):
        everything(model, "layers.0.resid_mide")
    for code, value, change in (
        ("shape", (2, 11), lambda x, _: x[..., 0]),
        ("dtype", torch.float64, lambda x, _: x.double()),
        ("device", torch.device("meta"), lambda x, _: x.to("meta")),
    ):
        with (
            rejects("layers.0.mlp_out", value, code),
            intervene(model, {"layers.0.mlp_out": change}),
        ):
            call(model)
    refused = rejects("layers.0.mlp_out", ..., "not_reached")
    with refused, intervene(model, {"layers.0.mlp_out": lambda x, _: x}):
        pass
    with rejects("every", 0, "range"):
        ActivationStore("*", every=0)
    with rejects("model", ..., "missing", where="Linear"):
        points_of(nn.Linear(2, 2))
    assert not any("point" in vars(m) or m._forward_hooks for m in model.modules())


class TestStore:
    def test_rows_of_many_calls_every_third(self):
        model = build()
        whole, third = (
            ActivationStore("*.resid_post"),
            ActivationStore("*.resid_post", every=3, dtype=torch.bfloat16),
        )
        rows = torch.randint(0, 64, (11, 7))
        with whole.watch(model), third.watch(model):
            for part in rows.split((1, 4, 1, 5)):
                model(part)
        name = "layers.2.resid_post"
        torch.testing.assert_close(whole[name], everything_of(model, rows)[name])
        assert torch.equal(third[name], whole[name][::3].bfloat16())
        assert third.rows == 11
        assert third.nbytes == 3 * 4 * 7 * 16 * 2

    def test_a_folder_holds_the_same_bits(self, tmp_path):
        model = build()
        here = everything(model)
        there = everything(model, folder=tmp_path / "new")
        assert all(torch.equal(here[name], there[name]) for name in here.names)
        assert sum(f.stat().st_size for f in (tmp_path / "new").iterdir()) == here.nbytes
        with rejects("folder", str(tmp_path / "new"), "not_empty"):
            ActivationStore("*", folder=tmp_path / "new")

    def test_a_folder_is_of_one_store_and_keeps_no_part_of_a_call(self, tmp_path):
        model = build()
        one, two = (ActivationStore("*.resid_pre", folder=tmp_path) for _ in range(2))
        with one.watch(model):
            call(model)
        wanted = {name: one[name].clone() for name in one.names}
        refused = rejects("folder", str(tmp_path), "exists")
        with refused, two.watch(model):
            model(TOKENS.flip(1))
        assert all(torch.equal(one[name], wanted[name]) for name in wanted)
        small = ActivationStore("*.resid_pre", folder=tmp_path / "small", max_bytes=2 * 11 * 16 * 4)
        with rejects("max_bytes", 2 * 11 * 16 * 4, "full"), small.watch(model):
            call(model)
        assert not any((tmp_path / "small").iterdir())

    def test_max_bytes_is_rejected_before_it_is_exceeded(self):
        model = build()
        size = 2 * 4 * 11 * 11 * 4
        everything(model, "layers.0.attn_scores", max_bytes=size)
        store = ActivationStore("layers.0.attn_scores", max_bytes=size - 1)
        refused = rejects("max_bytes", size - 1, "full", where=f"{size}")
        with refused, store.watch(model):
            call(model)
        assert store.nbytes == 0
        assert type(model.layers["0"].mixer.attend).__name__ == "LocalAttention"

    def test_a_value_is_a_copy_without_graph(self):
        model = build()
        store = ActivationStore("layers.0.mlp_out")
        in_place = {"layers.0.mlp_out": lambda x, _: x.mul_(2)}
        with store.watch(model), intervene(model, in_place):
            call(model)
        value = store["layers.0.mlp_out"]
        assert not value.requires_grad
        assert torch.equal(value, everything(model)["layers.0.mlp_out"])

    def test_a_recomputed_forward_counts_once(self):
        from torch.utils.checkpoint import checkpoint

        model = build()
        block = model.layers["1"]
        plain = block.forward
        block.forward = lambda *a: checkpoint(plain, *a, use_reentrant=False)
        store = ActivationStore("layers.1.mlp_out")
        with store.watch(model):
            call(model).sum().backward()
        assert store["layers.1.mlp_out"].shape == (2, 11, 16)

    def test_rows_before_any_call_are_rejected(self):
        model = build()
        store = ActivationStore("*.q")
        with store.watch(model):
            pass
        with rejects("layers.0.q", ..., "empty"):
            store["layers.0.q"]
        with pytest.raises(KeyError, match=r"layers\.0\.k"):
            store["layers.0.k"]

    def test_rows_of_two_lengths_are_chunks_and_no_tensor(self):
        model, store = build(), ActivationStore("layers.0.q")
        with store.watch(model):
            model(TOKENS)
            model(TOKENS[:, :5])
        assert [chunk.size(1) for chunk in store.chunks("layers.0.q")] == [11, 5]
        with rejects("layers.0.q", ..., "shape"):
            store["layers.0.q"]

    def test_a_block_that_runs_twice_in_a_call_is_rejected(self):
        model, store = build(), ActivationStore("layers.0.mlp_out")
        model.layers["1"] = model.layers["0"]
        with rejects("layers.0.mlp_out", ..., "twice"), store.watch(model):
            model(TOKENS)

    def test_a_call_that_fails_leaves_nothing(self):
        model = build()
        store = ActivationStore("*.q")
        with store.watch(model):
            with rejects("tokens", (1, 10**5), "length"):
                model(torch.zeros(1, 10**5, dtype=torch.int64))
            call(model)
        assert store["layers.0.q"].shape[0] == store.rows == 2


def everything_of(model, rows):
    store = ActivationStore("*.resid_post")
    with store.watch(model):
        model(rows)
    return store

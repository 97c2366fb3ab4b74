"""Adapters compute what their definition says, and what peft computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_core import Transformer, TransformerConfig, cross_entropy, generate, initialize
from forge_core.lora import (
    LoRAConfig,
    LoRALinear,
    adapter_names,
    frozen_names,
    lora,
    merge,
    merged_weight,
    without_adapter,
)
from forge_core.model import MLAConfig
from forge_core.optim import AdamW, param_groups
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

CONFIG = TransformerConfig(
    vocab_size=37, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, qkv_bias=True
)
ADAPTERS = LoRAConfig(("*.q_proj", "*.v_proj", "*.down_proj"), rank=3, alpha=5.0)


def _model():
    model = Transformer(CONFIG)
    initialize(model, 1)
    return model


def _tokens(rows=2, seed=0):
    return torch.randint(37, (rows, 9), generator=torch.Generator().manual_seed(seed))


def _randomise(model):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name in adapter_names(model):
            parameter = model.get_parameter(name)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)


def test_it_begins_as_the_model_was_and_only_adapters_train():
    model, plain = _model(), _model()
    names = lora(model, ADAPTERS, base_dtype=None)
    assert names == [
        f"layers.{i}.{n}"
        for i in range(2)
        for n in ("mixer.q_proj", "mixer.v_proj", "feed_forward.down_proj")
    ]
    assert torch.equal(model(_tokens()), plain(_tokens()))
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(adapter_names(model))
    assert set(plain.state_dict()) == set(model.state_dict()) - set(adapter_names(model))
    assert len(adapter_names(model)) == 2 * len(names)


def test_it_equals_its_definition_in_float64():
    linear = nn.Linear(7, 5).double()
    layer = LoRALinear(linear, LoRAConfig(("x",), rank=2, alpha=3.0)).double()
    nn.init.normal_(layer.lora_b)
    x = torch.randn(4, 7, dtype=torch.float64)
    want = torch.stack(
        [
            linear.weight @ row + linear.bias + 1.5 * (layer.lora_b @ (layer.lora_a @ row))
            for row in x
        ]
    )
    assert (layer(x) - want).abs().max() < 1e-12


def test_merge_gives_the_same_logits_and_plain_layers():
    model = _model()
    lora(model, ADAPTERS, base_dtype=None)
    _randomise(model)
    want = model(_tokens())
    merge(model)
    assert not any(isinstance(m, LoRALinear) for m in model.modules())
    assert set(model.state_dict()) == set(_model().state_dict())
    assert all(p.requires_grad for p in model.parameters())
    assert (model(_tokens()) - want).abs().max() / want.abs().max() < 1e-5


def test_a_base_in_bf16_computes_in_the_dtype_of_the_stream():
    model = _model()
    lora(model, ADAPTERS)
    assert model.layers["0"].mixer.q_proj.weight.dtype == torch.bfloat16
    assert model.layers["0"].mixer.q_proj.lora_a.dtype == torch.float32
    layer = model.layers["0"].mixer.q_proj
    x = torch.randn(3, 16)
    assert torch.equal(layer(x), F.linear(x, layer.weight.float(), layer.bias.float()))
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_it_trains_the_adapters_and_generates():
    model = _model()
    lora(model, ADAPTERS, base_dtype=None)
    initialize(model, 1)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = AdamW(param_groups(model, weight_decay=0.0), lr=3e-2)
    tokens, losses = _tokens(4), []
    for _ in range(30):
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.2
    assert all(torch.equal(model.get_parameter(n), p) for n, p in frozen.items())
    assert generate(model, tokens[:1, :3].tolist(), max_new_tokens=3).shape == (1, 3)


def test_initial_values_are_a_function_of_seed_and_name():
    models = [_model() for _ in range(2)]
    for model in models:
        lora(model, ADAPTERS, base_dtype=None)
        initialize(model, 3)
    one, two = (m.state_dict() for m in models)
    assert all(torch.equal(one[name], two[name]) for name in one)
    a = one["layers.0.mixer.q_proj.lora_a"]
    assert a.std() == pytest.approx((1 / 48) ** 0.5, rel=0.3)
    assert not one["layers.0.mixer.q_proj.lora_b"].any()


@pytest.mark.parametrize(
    ("pattern", "code", "named"),
    [
        ("*.query_proj", "not_found", " layers."),
        ("lm_head", "type", "lm_head (Head)"),
        ("layers.0", "type", "layers.0 (Block)"),
    ],
)
def test_modules_without_an_adapter_are_rejected_before_any_change(pattern, code, named):
    model = _model()
    with rejects("lora.patterns", pattern, code, where=named):
        lora(model, LoRAConfig(("*.q_proj", pattern)))
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert not any(isinstance(m, LoRALinear) for m in model.modules())


def test_patterns_exclude():
    patterns = ("*.mixer.*", "!*.k_proj", "!*.v_proj", "!*_norm", "!*.attend")
    names = lora(_model(), LoRAConfig(patterns))
    assert names == [f"layers.{i}.mixer.{n}_proj" for i in range(2) for n in ("q", "o")]
    with rejects("patterns", ("!*.k_proj",), "type"):
        LoRAConfig(("!*.k_proj",))


def test_latent_attention_is_adapted_but_for_the_layer_that_decoding_absorbs():
    widths = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    model = Transformer(replace(CONFIG, mixer="mla", mla=MLAConfig(**widths), num_kv_heads=None))
    names = {name.rpartition(".")[2] for name in lora(model, LoRAConfig())}
    assert names == {"q_proj", "kv_a_proj", "o_proj"}


def test_F126_values_of_a_custom_model_stay():
    model = nn.Sequential(nn.Linear(3, 3), nn.Embedding(3, 3), nn.LayerNorm(3))
    lora(model, LoRAConfig(("0",)), base_dtype=None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    initialize(model, 5, strict=False, by_kind=False)
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == {"0.lora_a"}  # in the adapter's init_table


def test_fully_trained_weights_keep_their_dtype():
    model = _model()
    lora(model, ADAPTERS, trained=("norm.*", "*.k_proj.bias"))
    whole = {"norm.weight", *(f"layers.{i}.mixer.k_proj.bias" for i in range(2))}
    trained = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
    assert trained == dict.fromkeys({*whole, *adapter_names(model)}, torch.float32)
    assert frozen_names(model) == {n for n, _ in model.named_parameters()} - trained.keys()


def test_full_weights_that_have_an_adapter_or_do_not_exist_are_rejected():
    name = "layers.0.mixer.q_proj.weight"
    with rejects("lora.whole", name, "excludes"):
        lora(_model(), ADAPTERS, trained=("*.q_proj.weight",))
    with rejects("lora.whole", "nrom.*", "not_found", where="norm.weight"):
        lora(_model(), ADAPTERS, trained=("nrom.*",))


def test_a_tied_weight_is_rejected():
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    with rejects("lora.patterns", "head", "tied", where="embedding.weight"):
        lora(model, LoRAConfig(("head",)))


def test_settings_that_cannot_be_are_rejected_together():
    with rejects("rank", 0, "range") as error:
        LoRAConfig((), rank=0, alpha=-1.0)
    assert_problem(error.value, "alpha", -1.0, "range")
    assert len(error.value.problems) == 3
    with rejects("model", ..., "layer"):
        merge(LoRALinear(nn.Linear(2, 2), LoRAConfig()))


def _peft_pair(dropout=0.0):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    ours = transformers.LlamaForCausalLM(config)
    theirs = transformers.LlamaForCausalLM(config)
    theirs.load_state_dict(ours.state_dict())
    layers = ["q_proj", "v_proj", "down_proj"]
    adapters = peft.LoraConfig(r=3, lora_alpha=5, target_modules=layers, lora_dropout=dropout)
    theirs = peft.get_peft_model(theirs, adapters)
    lora(
        ours, LoRAConfig(tuple(f"*.{name}" for name in layers), rank=3, alpha=5.0), base_dtype=None
    )
    given = dict(theirs.named_parameters())
    with torch.no_grad():
        for name in adapter_names(ours):
            other = name.replace("lora_a", "lora_A.default.weight").replace(
                "lora_b", "lora_B.default.weight"
            )
            parameter = given[f"base_model.model.{other}"]
            if name.endswith("lora_b"):
                parameter.normal_(0.0, 0.1)
            ours.get_parameter(name).copy_(parameter)
    return ours, theirs


def test_logits_and_twenty_steps_equal_peft():
    ours, theirs = _peft_pair()
    tokens = torch.randint(61, (3, 12), generator=torch.Generator().manual_seed(1))
    assert (ours(tokens).logits - theirs(tokens).logits).abs().max() < 1e-6
    for model in (ours, theirs):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)
        for step in range(20):
            batch = tokens.roll(step, 1)
            model(batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    want = theirs(tokens).logits
    assert (ours(tokens).logits - want).abs().max() / want.abs().max() < 1e-5
    merge(ours)
    assert (ours(tokens).logits - want).abs().max() / want.abs().max() < 1e-5


def test_F197_a_merged_weight_is_summed_in_fp32_and_rounded_once():
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=g).bfloat16()
    a, b = torch.randn(3, 64, generator=g) / 4, torch.randn(64, 3, generator=g) / 4
    wanted = (weight.double() + 0.5 * (b.double() @ a.double())).bfloat16()
    # the products are in fp32: a sum at the middle of two bf16 numbers may fall to the other one
    assert int((merged_weight(weight, a, b, 0.5) != wanted).sum()) <= 4


class Expert(nn.Module):
    """A stack of matrices with biases, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.zeros(3, 4, 2))
        self.up_proj_bias = nn.Parameter(torch.zeros(3, 2))
        self.down_proj = nn.Linear(2, 4)


def test_F155_matrices_that_patterns_match_without_effect_are_named() -> None:
    model = nn.ModuleDict({"a": Expert(), "b": Expert()})
    patterns = ("*_proj*", "!b.up*", "!*bias")
    lora(model, LoRAConfig(patterns, rank=2))
    assert without_adapter(model, patterns) == ["a.up_proj"]
    assert without_adapter(model, ("*.down_proj",)) == []
    with rejects("lora.patterns", "*.up_proj", "stack"):
        lora(nn.ModuleDict({"a": Expert()}), LoRAConfig(("*.up_proj",)))

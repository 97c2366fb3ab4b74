"""Hugging Face models are cut by the plan that they carry."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensor_models import batch, copy_of, errors, mesh_of, shard

from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_parallel.axes.roles import roles_of_plan
from forge_parallel.axes.tensor import tensor_parallel
from forge_parallel.axes.vocab import vocab_cross_entropy
from forge_testing import device, run_on_ranks
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

transformers = pytest.importorskip("transformers")


def build(kind, **options):
    settings = {
        "vocab_size": 37,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 32,
        "pad_token_id": None,
        **options,
    }
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**settings)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    return model.train()


def _against_one_process(kind, tied):
    mesh = mesh_of(2, 2)
    model = build(kind, tie_word_embeddings=tied)
    reference = copy_of(model)
    tokens, labels, _ = batch(2)
    flat = reference(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    want = F.cross_entropy(flat, labels.flatten(), reduction="sum") / (labels != -100).sum()
    want.backward()
    tensor_parallel(model, mesh["tp"])
    shard(model, mesh["dp_shard"])
    row = mesh["dp_shard"].get_local_rank()
    logits = model(input_ids=tokens[row : row + 1], use_cache=False).logits
    total = vocab_cross_entropy(logits, labels[row : row + 1], mesh["tp"]).sum
    loss = total / (labels != -100).sum()
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss, group=mesh["dp_shard"].get_group())
    same = list(model.state_dict()) == list(reference.state_dict())
    return float((loss - want).abs() / want), errors(model, reference), tuple(logits.shape), same


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize(("kind", "tied"), [("Llama", True), ("Qwen3", False)])
def test_tp_plan_with_fsdp_equals_one_process(kind, tied):
    for loss, found, shape, same in run_on_ranks(4, _against_one_process, kind, tied, timeout=120):
        worst = max(found, key=found.get)
        assert loss < 1e-5
        assert found[worst] < 1e-5, (worst, found[worst])
        assert shape == (1, 8, 19)
        assert same
        assert ("model.layers.0.self_attn.q_norm.weight" in found) == (kind == "Qwen3")


def test_roles_of_what_the_plan_leaves_out():
    roles = roles_of_plan(build("Qwen3"))
    assert roles["model.embed_tokens.weight"] == "vocab"
    assert roles["model.layers.0.self_attn.q_norm.weight"] == "replicate_sum_grad"
    assert roles["model.layers.0.input_layernorm.weight"] == "opaque"
    assert roles["lm_head.weight"] == "gather_output"


def test_F113_unknown_styles_and_forgotten_norms_are_rejected_by_name():
    model = build("Qwen3")
    plan = dict(model.config.base_model_tp_plan)
    plan["layers.*.mlp.up_proj"] = "packed_colwise"
    del plan["layers.*.self_attn.k_norm"]
    model.config.base_model_tp_plan, model._tp_plan = plan, {"lm_head": "colwise_gather_output"}
    with rejects("model.layers.0.mlp.up_proj", "packed_colwise", "style") as caught:
        roles_of_plan(model)
    assert_problem(caught.value, "model.layers.0.self_attn.k_norm", ..., "missing")
    first, _ = caught.value.problems  # once, not for each layer
    assert "1 more" in first.fix


def _own_loss_and_text(kind):
    """(errors of HF's own loss, and of its gradients; whether logits and greedy text are one process's)."""
    config = ParallelConfig(device=device().type, precision="fp32", tp=2, sequence_parallel=False)
    model = build(kind)
    reference = copy_of(model)
    tokens, labels, _ = batch(2)
    parallelize(model, config, make_meshes(config))
    losses = []
    for each in (model, reference):
        loss = each(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
    worst = max(errors(model, reference).values())
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    texts = [each.generate(tokens, **options) for each in (model, reference)]
    model.eval()
    logits = model(input_ids=tokens).logits
    near = torch.allclose(logits, reference.eval()(input_ids=tokens).logits, atol=1e-4)
    padded = tokens.clone()
    padded[0, :2] = 0  # of which generate() makes a mask, if forward says that it takes one
    texts += [each.generate(padded, **options) for each in (model, reference)]
    return float((losses[0] - losses[1]).abs()), worst, near, all(map(torch.equal, texts[::2], texts[1::2]))  # fmt: skip


def test_F94_a_model_of_hugging_face_has_its_full_vocabulary_except_in_training():
    for loss, worst, near, same in run_on_ranks(2, _own_loss_and_text, "Llama", timeout=120):
        assert loss < 1e-5
        assert worst < 1e-5
        assert near
        assert same


def _with_dropout(dropout):
    config = ParallelConfig(device=device().type, precision="fp32", tp=2, sequence_parallel=False)
    try:
        parallelize(build("Llama", attention_dropout=dropout), config, make_meshes(config))
    except ValueError as error:
        return error
    return None


def test_F89_dropout_of_a_model_of_hugging_face_is_rejected_under_tp():
    assert run_on_ranks(2, _with_dropout, 0.0) == [None, None]
    (error, _) = run_on_ranks(2, _with_dropout, 0.25)
    assert_problem(error, "model.layers.0.self_attn.attention_dropout", 0.25, "dropout")
    assert len(error.problems) == 1


def _cut_stream():
    try:
        tensor_parallel(build("Llama"), mesh_of(1, 2)["tp"], sequence_parallel=True)
    except ValueError as error:
        return error


def test_sequence_parallelism_of_a_plan_is_rejected():
    error = run_on_ranks(2, _cut_stream)[0]
    assert_problem(error, "sequence_parallel", True, "excludes")
    assert "LlamaForCausalLM" in str(error)

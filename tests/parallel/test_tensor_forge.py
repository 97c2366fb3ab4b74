"""Forge's transformer, dense and with experts, over tensor-parallel ranks equals one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forge_core import Transformer, TransformerConfig, cross_entropy
from forge_moe import MoE, MoEConfig
from forge_parallel.axes import tensor_parallel, vocab_cross_entropy
from forge_testing import device, run_on_ranks

VOCAB, SIZE = 61, 16


def _model(kind: str) -> Transformer:
    config = TransformerConfig(
        vocab_size=VOCAB,
        dim=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=SIZE,
        qk_norm=True,
        qkv_bias=True,
        tie_embeddings=kind != "moe",
    )
    moe = MoEConfig(
        dim=16,
        hidden_dim=12,
        num_experts=4,
        top_k=2,
        num_shared_experts=1,
        shared_gate=True,
        aux="none",
    )
    torch.manual_seed(0)
    model = Transformer(config, feed_forward=(lambda _: MoE(moe)) if kind == "moe" else None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return model.to(device())


def _batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (2, SIZE), generator=generator)
    labels = torch.randint(0, VOCAB, (2, SIZE), generator=generator)
    labels[0, :5] = -100
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 3 + [1] * 4 + [2] * 6 + [-1] * 3])
    return tokens.to(device()), labels.to(device()), documents.to(device())


def _shard(model: Any, mesh: Any, everywhere: Any) -> None:
    layers = [m for m in model.modules() if isinstance(m, MoE)]
    routers, experts = [m.router for m in layers], [m.experts for m in layers]
    for module in [*routers, *experts, *model.blocks(), model]:
        fully_shard(module, mesh=everywhere if module in experts else mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for router in routers:
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(router, "route")


def _against_one_process(
    dp: int, kinds: tuple[str, ...]
) -> dict[Any, tuple[float, dict[str, float]]]:
    mesh = init_device_mesh(device().type, (dp, 2), mesh_dim_names=("dp_shard", "tp"))
    everywhere, data = mesh._flatten("everywhere"), mesh["dp_shard"]
    rows = slice(None) if dp == 1 else slice(data.get_local_rank(), data.get_local_rank() + 1)
    tokens, labels, documents = _batch()
    count = (labels != -100).sum()
    found = {}
    for kind in kinds:
        for sequence_parallel in (False, True):
            model = _model(kind)
            one = copy.deepcopy(model)
            want = cross_entropy(one(tokens, document_ids=documents), labels).mean
            want.backward()
            tensor_parallel(model, mesh["tp"], sequence_parallel=sequence_parallel)
            _shard(model, data, everywhere)
            logits = model(tokens[rows], document_ids=documents[rows])
            loss = vocab_cross_entropy(logits, labels[rows], mesh["tp"]).sum / count
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total, group=data.get_group())
            errors = {"loss": float((total - want).abs() / want)}
            theirs = dict(one.named_parameters())
            for name, parameter in model.named_parameters():
                full, grad = parameter.grad.full_tensor(), theirs[name].grad
                errors[name] = float((full - grad).abs().max() / grad.abs().max())
            assert list(model.state_dict()) == list(one.state_dict())
            found[kind, sequence_parallel] = errors
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, 2])
def test_transformer_over_tensor_parallel_ranks_equals_one_process(dp: int) -> None:
    for rank in run_on_ranks(2 * dp, _against_one_process, dp, ("dense", "moe"), timeout=200):
        for case, errors in rank.items():
            worst = max(errors, key=lambda name: errors[name])
            assert errors[worst] < 1e-5, (case, worst, errors[worst])

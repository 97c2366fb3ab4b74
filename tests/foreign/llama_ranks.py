"""A Llama of transformers with torch's own mesh: without ranks proved on two, else trained on these ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from forge_parallel import ParallelConfig, global_count, make_meshes, parallelize
from forge_parallel.prove import prove


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict[str, Any](hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=64)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def train() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    config, add = ParallelConfig(precision="fp32"), nn.CrossEntropyLoss(reduction="sum")
    model = parallelize(llama(), config, mesh=mesh, blocks="model.layers.*")
    alone, tokens = llama(), torch.arange(16).view(2, 8)
    count = global_count(8, make_meshes(config, mesh=mesh))  # 8 labels of this rank, 16 in all
    own = tokens[mesh.get_rank(), None]
    (add(model(own).logits[0], own[0]) / count).backward()
    (add(alone(tokens).logits.flatten(0, 1), tokens.flatten()) / 16).backward()
    for ours, wanted in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), wanted.grad, rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        train()
    else:
        print([r.verdict for r in prove(llama, layouts=[{"tp": 2}], nproc=2, tolerance=1e-5)])

"""A Llama of transformers on two ranks, proved and trained with torch's own mesh: forge_parallel only."""

import sys

from only import only

only("forge_parallel")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import multiprocessing, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from forge_parallel import ParallelConfig, global_count, make_meshes, parallelize  # noqa: E402
from forge_parallel.prove import prove  # noqa: E402


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    config, add = ParallelConfig(precision="fp32"), nn.CrossEntropyLoss(reduction="sum")
    model = parallelize(llama(), config, mesh=mesh, blocks="model.layers.*")
    alone, tokens = llama(), torch.arange(16).view(2, 8)
    count = global_count(8, make_meshes(config, mesh=mesh))  # 8 labels of this rank, 16 in all
    (add(model(tokens[rank, None]).logits[0], tokens[rank]) / count).backward()
    (add(alone(tokens).logits.flatten(0, 1), tokens.flatten()) / 16).backward()
    for ours, wanted in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), wanted.grad, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    print([r.verdict for r in prove(llama, layouts=[{"tp": 2}], nproc=2, tolerance=1e-5)])
    multiprocessing.spawn(train, (sys.argv[1],), nprocs=2)

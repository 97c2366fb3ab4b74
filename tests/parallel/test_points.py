"""Points of a model whose layers come from other packages, and of models in layouts that keep rows whole."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forge_core import Transformer, TransformerConfig
from forge_core.interp import ActivationStore, intervene
from forge_moe import MoE, MoEConfig
from forge_parallel.compile import compile_blocks
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

TOKENS = torch.randint(0, 64, (4, 9), generator=torch.Generator().manual_seed(0))


def mixture():
    config = TransformerConfig(vocab_size=64, dim=16, num_layers=2, num_heads=4, init_std=0.3)
    experts = MoEConfig(dim=16, hidden_dim=24, num_experts=4, top_k=2)
    return Transformer(config, feed_forward=lambda i: MoE(experts)).eval().to(device())


def everything(model, tokens, *patterns):
    store = ActivationStore(patterns or "*")
    with store.watch(model):
        model(tokens)
    return store


def test_router_logits_are_read_and_changed():
    model = mixture()
    store = everything(model, TOKENS, "layers.1.*")
    logits = store["layers.1.router_logits"]
    assert logits.shape == (4, 9, 4)
    entered = model.layers["1"].feed_forward_norm(store["layers.1.resid_mid"])
    torch.testing.assert_close(logits, entered @ model.layers["1"].feed_forward.router.weight.T)
    only = torch.tensor([0.0, 50.0, 50.0, 0.0])
    with intervene(model, {"layers.1.router_logits": lambda x, _: x * 0 + only}):
        model.layers["1"].feed_forward.statistics(reset=True)
        model(TOKENS)
    assert model.layers["1"].feed_forward.statistics()["counts"].tolist() == [0, 36, 36, 0]
    assert everything(model, TOKENS, "layers.1.router_logits", "logits")["logits"].equal(
        model(TOKENS)
    )


@pytest.mark.slow
def test_blocks_that_the_runner_compiles_are_rejected_by_name():
    model = compile_blocks(Transformer(TransformerConfig(64, dim=16, num_layers=2, num_heads=4)))
    with rejects("layers.0.resid_mid", ..., "compiled"):
        everything(model, TOKENS, "layers.*.resid_mid")
    assert len(everything(model.eval(), TOKENS, "final_norm")["final_norm"]) == 4


def sharded():
    model = mixture()
    tokens = TOKENS.to(device())
    whole = everything(model, tokens)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    found = everything(model, tokens[rows])
    keep = torch.tensor([1.0, 0, 1, 1], device=device())[:, None]
    with intervene(model, {"layers.0.head_out": lambda x, _: x * keep}):
        ablated = model(tokens[rows])
    again = everything(model, tokens[rows])
    worst = max(float((found[n] - whole[n][rows]).abs().max()) for n in whole.names)
    same = all(torch.equal(found[n], again[n]) for n in whole.names)
    return found.names == whole.names, worst, same, ablated


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
def test_fsdp_has_the_same_points_and_values():
    model = mixture()
    with torch.no_grad():
        model.layers["0"].mixer.o_proj.weight[:, 4:8] = 0
        wanted = model(TOKENS)
    for rank, (names, worst, same, ablated) in enumerate(run_on_ranks(2, sharded)):
        assert names
        assert same
        assert worst < 1e-5
        torch.testing.assert_close(ablated, wanted[2 * rank : 2 * rank + 2], rtol=0, atol=1e-5)

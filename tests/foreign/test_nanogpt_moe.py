"""A loop like nanoGPT's, whose blocks have a MoE layer in place of the MLP."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytestmark = [pytest.mark.lane("test"), pytest.mark.uses("forge_moe")]


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        from forge_moe import MoE

        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.moe = MoE(dim=dim, hidden_dim=2 * dim, num_experts=4, aux_loss_weight=0.01, bias_update_rate=0.01)  # fmt: skip

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        y, aux = self.moe(self.ln_2(x), return_aux=True)
        return x + y, aux.total


def test_the_loss_falls_and_the_load_is_balanced() -> None:
    from forge_moe import register_expert_bias_update

    torch.manual_seed(1337)
    wte, blocks = nn.Embedding(16, 16), nn.ModuleList(Block(16) for _ in range(2))
    model = nn.ModuleDict(
        {"wte": wte, "h": blocks, "ln_f": nn.LayerNorm(16), "lm_head": nn.Linear(16, 16)}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    register_expert_bias_update(optimizer, model)
    mask, losses = nn.Transformer.generate_square_subsequent_mask(12), []
    for _ in range(30):
        tokens = (torch.randint(16, (8, 1)) + torch.arange(13)) % 16
        x, aux = wte(tokens[:, :-1]), torch.zeros(())
        for block in blocks:
            x, loss = block(x, mask)
            aux = aux + loss
        logits = model["lm_head"](model["ln_f"](x))
        losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        (losses[-1] + aux).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert losses[-1] < 0.3 * losses[0]
    assert all(block.moe.router.expert_bias.abs().max() > 0.01 for block in blocks)

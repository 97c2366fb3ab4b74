"""A loop like nanoGPT's, whose blocks have a MoE layer in place of the MLP."""

import torch
from torch import Tensor, nn

from forge_moe import MoE, register_expert_bias_update


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.moe = MoE(dim, 2 * dim, num_experts=4, aux_loss_weight=0.01, bias_update_rate=0.01)

    def forward(self, x: Tensor, aux: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        y, losses = self.moe(self.ln_2(x), return_aux=True)
        return x + y, aux + losses.total


wte, lm_head = nn.Embedding(16, 16), nn.Linear(16, 16)
model = nn.ModuleDict({"wte": wte, "h": nn.ModuleList([Block(16), Block(16)]), "lm_head": lm_head})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
register_expert_bias_update(optimizer, model)
mask = nn.Transformer.generate_square_subsequent_mask(12)
losses: list[float] = []
for _ in range(30):
    tokens = (torch.randint(16, (8, 1)) + torch.arange(13)) % 16
    x, aux = wte(tokens[:, :-1]), torch.zeros(())
    for block in model["h"].children():
        x, aux = block(x, aux, mask)
    loss = nn.functional.cross_entropy(lm_head(x).flatten(0, 1), tokens[:, 1:].flatten())
    (loss + aux).backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

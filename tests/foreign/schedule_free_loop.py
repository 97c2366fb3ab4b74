"""A plain loop with schedule-free AdamW and a GradScaler that leaves out a step."""

import torch
from torch import nn

from forge_core import ScheduleFreeAdamW

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
x, y = torch.randn(64, 4), torch.randn(64, 4).sum(1, keepdim=True)
optimizer = ScheduleFreeAdamW(model.parameters(), lr=2e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
losses: list[float] = []
for step in range(40):
    loss = nn.functional.mse_loss(model(x), y) * (float("inf") if step == 3 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # leaves out step 3
    scaler.update()
    optimizer.zero_grad()
    if step % 10 == 9:
        optimizer.eval()
        losses.append(nn.functional.mse_loss(model(x), y).item())
        optimizer.train()

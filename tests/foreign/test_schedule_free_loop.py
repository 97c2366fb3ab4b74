"""A plain loop with schedule-free AdamW and a GradScaler, and the errors of weights and of the wrong mode."""

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.lane("test"), pytest.mark.uses("forge_core")]


def test_a_plain_loop_with_a_loss_scaler() -> None:
    from forge_core import ScheduleFreeAdamW

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    x, y = torch.randn(64, 4), torch.randn(64, 4).sum(1, keepdim=True)
    optimizer = ScheduleFreeAdamW(model.parameters(), lr=2e-2)
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=2.0**10), []
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
    assert losses == sorted(losses, reverse=True)
    assert scaler.get_scale() == 2.0**9
    assert {float(state["step"]) for state in optimizer.state.values()} == {39.0}

    # the average does not train, and half precision loses small steps: both are errors, not a worse loss
    optimizer.eval()
    scaler.scale(model(x).sum()).backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.train\(\)"):
        scaler.step(optimizer)
    with pytest.raises(ValueError, match=r"torch\.float16"):
        ScheduleFreeAdamW(model.half().parameters(), lr=2e-2)

"""A loop of accelerate in one process, with Forge's AdamW and a scheduler of torch: as torch's AdamW."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

pytestmark = [pytest.mark.slow, pytest.mark.lane("ci"), pytest.mark.uses("forge_core")]
accelerate = pytest.importorskip("accelerate")


def train(accelerator, build, folder, steps: int, resume: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = build(model)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(4, (32,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, CosineAnnealingLR(optimizer, T_max=16)
    )
    if resume:
        accelerator.load_state(folder)
    for _, (x, labels) in zip(range(steps), loader):
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), labels))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.save_state(folder)
    accelerator.free_memory()
    return list(accelerator.unwrap_model(model).parameters())


@pytest.mark.parametrize("resume", [False, True])
def test_it_is_the_adamw_of_torch(resume: bool, tmp_path) -> None:
    from forge_core import AdamW

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    found = []
    for build in (
        lambda m: AdamW(m.parameters(), 1e-2),
        lambda m: torch.optim.AdamW(m.parameters(), 1e-2, fused=True),
    ):
        weights = train(accelerator, build, tmp_path, 4)
        found.append(train(accelerator, build, tmp_path, 4, resume=True) if resume else weights)
    assert all(map(torch.equal, *found))

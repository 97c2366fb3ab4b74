"""HostCopy: numbers of a device, read later, by name."""

from __future__ import annotations

import pytest
import torch

from forge_parallel.host_copy import HostCopy

pytestmark = pytest.mark.lane("test")


def test_numbers_come_back_flat_by_name_with_all_their_bits() -> None:
    third, counts = torch.tensor(1 / 3, dtype=torch.float64), torch.arange(6).view(2, 3)
    copy = HostCopy({"third": third, "none": torch.zeros(0), "counts": counts})
    assert copy.read() == {"third": [1 / 3], "none": [], "counts": [0, 1, 2, 3, 4, 5]}
    assert copy.read() == copy.read()


def test_a_later_change_of_the_tensor_is_not_seen() -> None:
    loss = torch.tensor(2.0, requires_grad=True)
    copy = HostCopy({"loss": loss})
    with torch.no_grad():
        loss.fill_(3.0)
    assert copy.read() == {"loss": [2.0]}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_from_a_gpu_does_not_wait_for_later_work() -> None:
    copy = HostCopy({"loss": torch.ones((), device="cuda")})
    torch.cuda._sleep(10**9)
    assert copy.read() == {"loss": [1.0]}
    assert not torch.cuda.current_stream().query()

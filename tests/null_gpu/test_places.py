"""Kernels and matmuls of single places, exact, and bounds of their peak memory."""

from __future__ import annotations

import json

import pytest
from tests.null_gpu import device
from tests.null_gpu.ranks import ROOT

pytestmark = pytest.mark.lane("test")
WHY_NOT = device.why_not()

# {place: (kernels, matmuls, largest peak in MB)}
BOUNDS = {
    "norm": (3, 0, 100),
    "norm_bf16": (4, 0, 100),
    "norm_fp32_weight": (3, 0, 100),
    "rotation": (2, 0, 110),
    "window": (11, 0, 510),
    "fused_loss": (245, 24, 3900),
    "rounding": (124, 0, 210),
}


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_kernels_of_a_place() -> None:
    done = device.run(["-m", "tests.null_gpu.places"], cwd=ROOT, skip_copies_above=2**20)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: (row["kernels"], row["matmuls"]) for name, row in found.items()} == {
        name: (kernels, matmuls) for name, (kernels, matmuls, _) in BOUNDS.items()
    }
    assert [n for n, (_, _, most) in BOUNDS.items() if found[n]["peak"] > most] == []

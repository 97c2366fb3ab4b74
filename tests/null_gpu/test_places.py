"""Kernels, matmuls and largest tensors of single places, exact, bounds of their peak memory, and the attention that torch chooses."""

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
    "sinks": (22, 0, 500),
    "sinks_window": (22, 0, 500),
    "sinks_packed": (20, 0, 510),
    "softcap": (3, 0, 140),
    "mla": (11, 0, 250),
    "mla_fp32": (6, 0, 260),
    "fused_loss": (245, 24, 3900),
    "rounding": (124, 0, 210),
}
#: The largest output of an operator, in MB: (T, H, D) in fp32, values (T, H, 192 or 128); scores are 17,180 and 537 to 1,073.
LARGEST = {"window": 67, "sinks": 134, "sinks_window": 134, "sinks_packed": 134, "mla": 25, "mla_fp32": 50}  # fmt: skip
CHOICES = {
    "allowed": {
        "llama": "cudnn",
        "gemma": "cudnn",
        "latent": "cudnn",
        "latent, padded": "cudnn",
        "not causal": "cudnn",
        "fp32": "efficient",
        "narrow values in bf16 and fp32": [True, True],
    },
    "deterministic": {
        "llama": "flash",
        "gemma": "flash",
        "latent": "efficient",
        "latent, padded": "flash",
        "not causal": "flash",
        "fp32": "efficient",
        "narrow values in bf16 and fp32": [False, True],
    },
}


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_kernels_of_a_place() -> None:
    done = device.run(["-m", "tests.null_gpu.places"], cwd=ROOT, skip_copies_above=2**20)
    written = json.loads(done.stdout.splitlines()[-1])
    found = written["places"]
    assert {name: (row["kernels"], row["matmuls"]) for name, row in found.items()} == {
        name: (kernels, matmuls) for name, (kernels, matmuls, _) in BOUNDS.items()
    }
    assert [n for n, (_, _, most) in BOUNDS.items() if found[n]["peak"] > most] == []
    assert {name: found[name]["largest"] for name in LARGEST} == LARGEST
    assert written["choices"] == CHOICES

"""Verdicts that stay on the device until somebody looks."""

from __future__ import annotations

import math

import pytest
import torch

from forge_resilience import nonfinite

pytestmark = pytest.mark.lane("test")


@pytest.mark.parametrize(("value", "verdict"), [(1.5, 0.0), (math.nan, 1.0), (-math.inf, 1.0)])
def test_the_verdict_is_a_tensor(value: float, verdict: float) -> None:
    flag = nonfinite(torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(value))
    assert flag.dtype == torch.float32
    assert flag.shape == ()
    assert float(flag) == verdict

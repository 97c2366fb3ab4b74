"""The examples of the README run, and the refusals it quotes are the real ones."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from forge_moe import MoE, MoEConfig, Router, RouterConfig, aux_losses

pytestmark = pytest.mark.lane("test")

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow  # CI runs it from the wheel, in scripts/smoke_wheels.py
def test_examples_run_and_are_short() -> None:
    layer, router, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(layer, names)
    exec(router, names)
    assert names["weights"].shape == names["ids"].shape == (64, 6)
    assert names["loss"].item() > 0
    assert len(layer.splitlines()) <= 10
    assert len(router.split("\n\n")[1].splitlines()) + 1 == 3


def eval_expert_choice() -> None:
    MoE(MoEConfig(8, 8, 4, router="expert_choice")).eval()(torch.randn(2, 8))


def take_twice() -> None:
    aux_losses(MoE(MoEConfig(8, 8, 4)))


def narrow() -> None:
    MoE(MoEConfig(12, 16, 4, backend="grouped_mm")).bfloat16()(torch.randn(2, 12).bfloat16())


def recompute() -> None:
    moe = MoE(MoEConfig(8, 8, 4, aux_loss_weight=0.1, aux_scope="global_batch"))
    checkpoint(moe, torch.randn(2, 8), use_reentrant=False).sum().backward()


@pytest.mark.parametrize(
    "act",
    [
        lambda: Router(RouterConfig(8, 4, name="gradient_scale")),
        lambda: MoEConfig(8, 8, 8, top_k=9),
        eval_expert_choice,
        take_twice,
        narrow,
        recompute,
    ],
)
def test_quoted_refusals(act) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:  # prose: README quotes the text
        act()
    assert f"`{caught.value}`" in README

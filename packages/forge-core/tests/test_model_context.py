"""What blocks share through a context survives FSDP2's rebuilding of it."""

from dataclasses import replace

import pytest
import torch

from forge_core import TokenContext

pytestmark = pytest.mark.lane("test")


def test_a_rebuilt_context_shares_what_was_derived() -> None:
    ctx = TokenContext(positions=torch.arange(3)[None])
    calls = []
    for each in (ctx, replace(ctx), replace(replace(ctx), valid=None)):
        each.once("table", lambda: calls.append(1))
    assert len(calls) == 1


def test_two_contexts_share_nothing() -> None:
    assert TokenContext().once("a", lambda: 1) != TokenContext().once("a", lambda: 2)


def test_other_tensors_derive_anew() -> None:
    """Rotary tables of the old positions would be silently wrong for the new ones."""
    ctx = TokenContext(positions=torch.arange(3)[None])
    ctx.once("table", lambda: "old")
    assert replace(ctx, positions=torch.arange(3)[None] + 1).once("table", lambda: "new") == "new"
    assert ctx.once("table", lambda: "new") == "old"

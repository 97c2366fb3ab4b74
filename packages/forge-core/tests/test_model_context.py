"""What blocks share through a context survives FSDP2's rebuilding of it."""

from dataclasses import replace

import torch

from forge_core import TokenContext


def test_a_rebuilt_context_shares_what_was_derived() -> None:
    ctx = TokenContext(positions=torch.arange(3)[None])
    calls = []
    for each in (ctx, replace(ctx), replace(ctx, valid=None)):
        each.once("table", lambda: calls.append(1))
    assert len(calls) == 1


def test_two_contexts_share_nothing() -> None:
    assert TokenContext().once("a", lambda: 1) != TokenContext().once("a", lambda: 2)

"""What blocks share through a context survives FSDP2's rebuilding of it."""

from dataclasses import dataclass, fields, replace

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


def test_other_tensors_are_derived_again() -> None:
    """Rotary tables of the old positions would be silently wrong for the new ones."""
    ctx = TokenContext(positions=torch.arange(3)[None])
    ctx.once("table", lambda: "old")
    assert replace(ctx, positions=torch.arange(3)[None] + 1).once("table", lambda: "new") == "new"
    assert ctx.once("table", lambda: "new") == "old"


@dataclass
class Images:
    """As FSDP2 rebuilds it: another object around the same tensors."""

    sizes: torch.Tensor


class Nothing:
    """A mask."""


@pytest.mark.parametrize("name", [field.name for field in fields(TokenContext) if field.init and field.name[0] != "_"])  # fmt: skip
def test_F161_another_value_of_any_field_is_derived_again(name: str) -> None:
    values = {"media": Images(torch.ones(2)), "mask": Nothing()}
    ctx = TokenContext(**{name: values.get(name, torch.ones(1, 2))})
    ctx.once("table", lambda: "old")
    others = {"media": Images(torch.ones(2)), "mask": Nothing()}
    other = replace(ctx, **{name: others.get(name, torch.ones(1, 2))})
    assert other.once("table", lambda: "new") == "new"


def test_media_that_FSDP2_rebuilt_around_the_same_tensors_shares() -> None:
    sizes = torch.ones(2)
    ctx = TokenContext(media={"a": [Images(sizes)]})
    ctx.once("table", lambda: "old")
    assert replace(ctx, media={"a": [Images(sizes)]}).once("table", lambda: "new") == "old"

"""Modules take a config or its fields, and `device` and `dtype`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from forge_core._shared.module_arguments import (
    FromConfig,
    config_arguments,
    factory,
    factory_arguments,
)

pytestmark = pytest.mark.lane("test")


@dataclass(frozen=True, kw_only=True)
class Base:
    act: str = "relu"
    scale: float = 1.0


@dataclass(frozen=True)
class Sizes(Base):
    dim: int
    hidden: int = 8
    tags: dict[str, int] = field(default_factory=dict)


class Layer(FromConfig, nn.Module):
    @config_arguments(Sizes)
    def __init__(self, config: Sizes, act: Any = None) -> None:
        super().__init__()
        self.config, self.act = config, act
        self.up = nn.Linear(config.dim, config.hidden)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("bias", torch.zeros(2, dtype=torch.float32))


class Plain(nn.Module):
    @factory_arguments
    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)


def test_a_config_and_its_fields_build_the_same() -> None:
    wanted = Sizes(4, hidden=16)
    keywords = (Layer(config=wanted), Layer(dim=4, hidden=16), Layer(4, 16))
    for built in (Layer(wanted), Layer.from_config(wanted), *keywords):
        assert built.config == wanted
        assert built.act is None


def test_a_keyword_of_both_is_a_field_unless_it_is_callable() -> None:
    assert Layer(dim=4, act="gelu").config.act == "gelu"
    own = Layer(dim=4, act=torch.tanh)
    assert (own.config.act, own.act) == ("relu", torch.tanh)
    assert Layer(Sizes(4), act=torch.tanh).act is torch.tanh


@pytest.mark.parametrize(
    ("given", "named"),
    [({}, "dim"), ({"dim": 4, "hiden": 8}, "hiden"), ({"config": Sizes(4), "hidden": 8}, "hidden")],
)
def test_other_keywords_are_python_errors(given: dict[str, Any], named: str) -> None:
    with pytest.raises(TypeError, match=named):
        Layer(**given)


def test_device_and_dtype_are_those_of_the_parameters() -> None:
    layer = Layer(dim=4, device="meta", dtype=torch.bfloat16)
    assert layer.up.weight.is_meta
    assert layer.up.weight.dtype == torch.bfloat16
    assert (layer.count.dtype, layer.bias.dtype) == (
        torch.int64,
        torch.float32,
    )  # set by the module
    assert Plain(4, bias=False, dtype=torch.float64).linear.weight.dtype == torch.float64
    with torch.device("meta"):
        assert Plain(4).linear.weight.is_meta
        assert not Plain(4, device="cpu").linear.weight.is_meta


def test_torch_has_its_default_dtype_again_after_an_error() -> None:
    with pytest.raises(TypeError, match="no_such_size"), factory(dtype=torch.float64):  # noqa: PT012
        assert torch.get_default_dtype() == torch.float64
        Sizes(no_such_size=1)  # type: ignore[call-arg]
    assert torch.get_default_dtype() == torch.float32


def test_the_signature_shows_fields_device_and_dtype() -> None:
    shown = inspect.signature(Layer).parameters
    first = ["config", "act", "dim"]  # and then what has a default
    assert [*shown] == [*first, "scale", "hidden", "tags", "device", "dtype"]
    assert shown["dim"].default is inspect.Parameter.empty
    assert shown["hidden"].default == 8
    assert [*inspect.signature(Plain).parameters] == ["width", "bias", "device", "dtype"]

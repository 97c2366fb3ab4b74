"""Private names of torch that would fail in silence if torch renamed them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from forge_parallel import _torch_compat

pytestmark = pytest.mark.lane("test")

OVERRIDDEN = ("_get_init_p2p_neighbors_ops", "backward_weight_one_chunk", "_validate_fwd_outputs")


def base_without(name: str) -> type:
    return type("Renamed", (), {other: None for other in OVERRIDDEN if other != name})


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_stage_that_overrides_nothing_is_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    with pytest.raises(AttributeError, match=f"Renamed of torch 2.11.0 must have {name}"):
        _torch_compat.stage_of(base_without(name))


def test_this_torch_has_what_a_stage_overrides() -> None:
    assert issubclass(_torch_compat.stage_of(PipelineStage), PipelineStage)


class Renamed:
    """An FSDP2 parameter whose gathered whole has another name."""

    unsharded_accumulated_grad: Any = None
    _gathered_param: nn.Parameter


def test_a_gathered_parameter_of_another_name_is_rejected() -> None:
    with pytest.raises(AttributeError, match=r"Renamed of torch .* must have _unsharded_param"):
        _torch_compat._gathered(Renamed())


def test_a_mark_unknown_to_the_compiler_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo  # without it nothing is asked

    called = _torch_compat.disable_compile(lambda: 1)
    assert called() == 1
    monkeypatch.setattr(torch.compiler, "disable", lambda function: function)
    with pytest.raises(AttributeError, match="must have _torchdynamo_disable"):
        _torch_compat.disable_compile(lambda: 1)()

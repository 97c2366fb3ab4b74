"""The shared topic `modes`, by the copy of one package; `check` compares the bytes of the others."""

from __future__ import annotations

import contextlib

import pytest
from torch import nn

from forge_core._shared.modes import evaluation_mode

pytestmark = pytest.mark.lane("test")


class Merging(nn.Linear):
    """Does something when its mode changes, as adapters that merge into their weight do."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        return super().train(mode)


@pytest.mark.parametrize("training", [True, False])
def test_each_module_gets_its_mode_back(training: bool) -> None:
    model = nn.Sequential(Merging(2, 2), nn.Dropout()).train(training)
    model[1].training = not training
    with contextlib.suppress(KeyError), evaluation_mode(model):
        assert not any(module.training for module in model.modules())
        assert model[0].merged
        raise KeyError
    assert [module.training for module in model.modules()] == [training, training, not training]
    assert model[0].merged is not training

"""Patterns of names: `!` excludes, order stays, and the nearest names are of different kinds of layers."""

from __future__ import annotations

import pytest

from forge_core._shared.names import match_names, matches, nearest_names, without_layer_number

pytestmark = pytest.mark.lane("test")

NAMES = ["layers.0.up.weight", "layers.10.up.weight", "layers.0.norm.weight", "head.weight"]


def test_patterns_choose_and_exclude() -> None:
    assert match_names(["*.weight", "!layers.*"], NAMES) == ["head.weight"]
    assert match_names(["head.*", "layers.1?.*"], NAMES) == [NAMES[1], NAMES[3]]
    assert match_names(["!head.*"], NAMES) == []
    assert not matches("Head.weight", ["head.*"]), "case counts"


def test_the_nearest_names_are_of_different_layers() -> None:
    assert nearest_names("layers.*.upp.weight", NAMES)[0] == NAMES[0]
    assert NAMES[1] not in nearest_names("layers.10.upp", NAMES)
    assert nearest_names("x", []) == []


def test_one_name_for_all_layers() -> None:
    assert without_layer_number("layers.3.up.weight") == "layers.*.up.weight"
    assert without_layer_number("3.up") == "*.up"
    assert without_layer_number("layers.cross_3.w0.weight") == "layers.cross_*.w0.weight"

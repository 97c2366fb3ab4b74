"""What forge-train says where forge-lab, which has the verbs for finished runs, is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

import forge_train
from forge_testing.problems import rejects
from forge_train import ConfigError, cli
from forge_train._renamed import OF_LAB

pytestmark = pytest.mark.lane("test")


@pytest.mark.parametrize("verb", cli.OF_LAB)
def test_a_verb_names_the_distribution(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_mounted", dict)
    with rejects("VERB", verb, "requires", ConfigError):
        cli.run_verb([verb, "runs/x"])


def test_help_names_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "_mounted", dict)
    cli.run_verb(["--help"])
    assert capsys.readouterr().out.count(" forge-lab\n") == len(cli.OF_LAB)


@pytest.mark.parametrize("name", OF_LAB)
def test_a_name_that_moved_needs_it_and_warns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name not in forge_train.__all__
    with pytest.deprecated_call():
        assert getattr(forge_train, name) is getattr(importlib.import_module("forge_lab"), name)
    monkeypatch.setitem(sys.modules, "forge_lab", None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=rf"forge_lab\.{name}"):
        getattr(forge_train, name)


@pytest.mark.parametrize("module", ["lm_harness", "lmms"])
def test_a_module_that_moved_needs_it(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.import_module(f"forge_train.{module}")
    monkeypatch.setitem(sys.modules, "forge_lab", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, f"forge_lab.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"forge_lab\.{module}"):
        _ = found.Forge

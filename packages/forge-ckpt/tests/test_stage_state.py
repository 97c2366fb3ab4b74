"""State of one stage of a model in a checkpoint of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forge_ckpt import CheckpointMismatch, Store
from forge_ckpt.frozen_base import FrozenBase, frozen_weights
from forge_ckpt.stage_state import InDtypes, NamedState, StageState, tensor_names
from forge_testing.problems import ANY, rejects

pytestmark = pytest.mark.lane("test")


class Named:
    """An optimizer with a number and a moment per trained parameter."""

    def __init__(self, model: nn.Module, value: float) -> None:
        self.state = {
            n: {"step": value, "moment": torch.full_like(p, value)}
            for n, p in model.named_parameters()
            if p.requires_grad
        }

    def named_state(self) -> dict[str, Any]:
        return self.state

    def load_named_state(self, state: dict[str, Any]) -> None:
        self.state = state


def stages() -> tuple[nn.Module, nn.ModuleDict, nn.ModuleDict]:
    """A whole model, and two parts with its names."""
    torch.manual_seed(0)
    whole = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.BatchNorm1d(3)})
    parts = (
        nn.ModuleDict({"a": nn.Linear(2, 3)}),
        nn.ModuleDict({"b": nn.BatchNorm1d(3)}),
    )
    return whole, *parts


def test_a_number_that_was_saved_as_another_type_is_rejected() -> None:
    whole, *_ = stages()
    named = NamedState.of(Named(whole, 3.0), whole, tensor_names(whole))
    state = {name: dict(slots) for name, slots in named.state_dict().items()}
    state["a.bias"]["step"] = [1]
    with rejects("a.bias.step", [1], "type"):
        named.load_checks(state)


def test_each_stage_loads_its_tensors_of_a_checkpoint_of_the_full_model(tmp_path: Path) -> None:
    whole, *parts = stages()
    names = tensor_names(whole)
    assert names == {*whole.state_dict()}
    with Store(tmp_path) as store:
        store.save(1, {"model": whole, "optimizer": NamedState.of(Named(whole, 3.0), whole, names)})
        for part in parts:
            others, optimizer = names - tensor_names(part), Named(part, 0.0)
            state = {
                "model": StageState(part, others),
                "optimizer": StageState(NamedState.of(optimizer, part, names), others),
            }
            assert store.load(state) == 1
            for name, tensor in part.state_dict().items():
                assert torch.equal(tensor, whole.state_dict()[name])
            assert optimizer.state.keys() == {n for n, _ in part.named_parameters()}
            assert all(slots["step"] == 3.0 for slots in optimizer.state.values())
            assert all(slots["moment"].eq(3.0).all() for slots in optimizer.state.values())


def test_saved_tensors_of_no_stage_are_a_mismatch(tmp_path: Path) -> None:
    whole, part, _ = stages()
    with Store(tmp_path) as store:
        store.save(1, {"model": whole})
        with pytest.raises(CheckpointMismatch, match=r"b\."):
            store.load({"model": StageState(part, set())})


def test_a_frozen_parameter_needs_no_state_and_leaves_what_was_saved(tmp_path: Path) -> None:
    whole, *_ = stages()
    names = tensor_names(whole)
    with Store(tmp_path) as store:
        store.save(1, {"optimizer": NamedState.of(Named(whole, 3.0), whole, names)})
        whole["a"].requires_grad_(False)
        fewer = Named(whole, 0.0)
        store.load({"optimizer": NamedState.of(fewer, whole, names)})
        assert {n: s["step"] for n, s in fewer.state.items()} == {"b.weight": 3.0, "b.bias": 3.0}
        store.save(2, {"optimizer": NamedState.of(fewer, whole, names)})
        whole["a"].requires_grad_(True)
        more = Named(whole, 7.0)
        store.load({"optimizer": NamedState.of(more, whole, names)})
        assert more.state["a.weight"]["step"] == 7.0
        assert more.state["b.bias"]["step"] == 3.0


def test_an_optimizer_without_named_state_is_left_as_it_is() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    assert NamedState.of(optimizer, model, set()) is optimizer


class Renewed(Named):
    """An optimizer that has other slots for biases than a version before, and an average next to them in both."""

    def __init__(self, model: nn.Module, value: float, slot: str) -> None:
        super().__init__(model, value)
        for name, slots in self.state.items():
            slots["average"] = torch.full_like(slots["moment"], value)
            if name.endswith("bias"):
                slots[slot] = slots.pop("moment")

    def outdated_slots(self, name: str, saved: set[str]) -> set[str]:
        return (
            {"momentum", "step"} & saved if name.endswith("bias") and "momentum" in saved else set()
        )


def test_F146_outdated_slots_are_left_out_and_the_rest_is_loaded(tmp_path: Path) -> None:
    whole, *parts = stages()
    names = tensor_names(whole)
    with Store(tmp_path) as store:
        store.save(1, {"optimizer": NamedState.of(Renewed(whole, 3.0, "momentum"), whole, names)})
        for part in parts:
            optimizer, others = Renewed(part, 0.0, "square"), names - tensor_names(part)
            own = StageState(NamedState.of(optimizer, part, names), others)
            assert store.load({"optimizer": own}) == 1
            values = {
                n: {s: float(torch.as_tensor(v).mean()) for s, v in slots.items()}
                for n, slots in optimizer.state.items()
            }
            prefix = "a" if "a.weight" in values else "b"
            assert values == {
                f"{prefix}.weight": {"step": 3.0, "moment": 3.0, "average": 3.0},
                f"{prefix}.bias": {"step": 0.0, "square": 0.0, "average": 3.0},
            }


def test_a_frozen_base_is_saved_once_and_read_back_next_to_checkpoints(tmp_path: Path) -> None:
    model, *_ = stages()
    frozen = {"a.weight", "a.bias"}
    base = FrozenBase(tmp_path / "base", model, frozen)
    base.save()
    with Store(tmp_path / "checkpoints") as store:
        store.save(1, base.objects())
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    torch.manual_seed(1)
    other = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.BatchNorm1d(3)})
    again = FrozenBase(tmp_path / "base", other, frozen)
    with Store(tmp_path / "checkpoints") as store:
        assert store.load(again.objects()) == 1
        assert not torch.equal(other["a"].weight, wanted["a.weight"])
    again.load()
    assert all(torch.equal(t, wanted[n]) for n, t in other.state_dict().items())

    assert frozen_weights(tmp_path / "base", base.state_dict()["digest"]).keys() == frozen
    with rejects("", str(tmp_path / "base"), "digest"):
        frozen_weights(tmp_path / "base", "other")
    again.load_state_dict({"digest": "other"})
    with rejects("digest", ANY, "mismatch"):
        again.load()
    again.load_state_dict(base.state_dict())
    larger = FrozenBase(tmp_path / "base", other, {*frozen, "b.weight"})
    larger.load_state_dict(base.state_dict())
    with rejects("", ["b.weight"], "model", CheckpointMismatch):
        larger.load()


def test_weights_are_read_in_fp32_and_cast(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    with Store(tmp_path) as store:
        store.save(1, {"model": model})
        half = nn.Linear(2, 3).to(torch.bfloat16)
        assert store.load({"model": InDtypes.fp32(half)}) == 1
    assert torch.equal(half.weight, model.weight.to(torch.bfloat16))

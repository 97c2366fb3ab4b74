"""Which modules are the blocks of a model: what it says, what its caller says, or its longest list."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_parallel.config import Layout
from forge_parallel.plan import Profile
from forge_parallel.structure import Structure, structure_of
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


class Block(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Other(Block):
    """Another kind of block, of the same family."""


class Body(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layers, self.norm = nn.Embedding(8, 4), layers, nn.LayerNorm(4)
        self.rotary = nn.Identity()


class Stranger(nn.Module):
    """A model as of somebody else: lists under other names, one level down, no methods of ours."""

    def __init__(self, layers: nn.Module, **more: nn.Module) -> None:
        super().__init__()
        self.body = Body(layers)
        self.head = nn.Linear(4, 8, bias=False)
        for name, module in more.items():
            self.add_module(name, module)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body.embedding(tokens)
        for layer in self.body.layers:  # type: ignore[attr-defined]
            x = layer(x)
        return self.head(self.body.norm(x))


def blocks(count: int, experts: int = 0, make: Callable[[int], Block] = Block) -> nn.ModuleList:
    return nn.ModuleList(make(experts) for _ in range(count))


def names(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}.{i}" for i in range(count))


ENDS = {"first": ("body.embedding",), "last": ("body.norm", "head")}
MIXED = nn.ModuleList([Block(), Other(), Block()])
NESTED = nn.ModuleList([blocks(2), blocks(3)])
UNLIKE = nn.ModuleList([Block(), nn.Linear(4, 4), nn.Linear(4, 4)])
CHOICES: dict[str, tuple[nn.Module, tuple[str, ...]]] = {
    "the one list": (Stranger(blocks(3)), names("body.layers", 3)),
    "the longer of two": (Stranger(blocks(3), heads=blocks(2)), names("body.layers", 3)),
    "not the experts inside, though more": (Stranger(blocks(2, 5)), names("body.layers", 2)),
    "kinds of one family": (Stranger(MIXED), names("body.layers", 3)),
    "modules-in-a-dict": (
        Stranger(nn.ModuleDict({"a": Block(), "b": Block()})), ("body.layers.a", "body.layers.b")),
    "nested lists": (
        Stranger(NESTED), (*names("body.layers.0", 2), *names("body.layers.1", 3))),
    "unlike modules": (Stranger(UNLIKE), ()),
    "one block": (Stranger(blocks(1)), ()),
    "nothing with parameters": (Stranger(nn.ModuleList([nn.Dropout(), nn.Dropout()])), ()),
    "one module four times": (Stranger(nn.ModuleList([Block()] * 4)), ()),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHOICES)
def test_the_longest_list_of_like_modules_is_taken(kind: str) -> None:
    model, expected = CHOICES[kind]
    found = structure_of(model)
    assert found.blocks == expected
    assert bool(found.chosen) == bool(expected)
    assert found.modules(model) == [model.get_submodule(name) for name in expected]
    if expected:
        assert {"first": found.first, "last": found.last[:2]} == ENDS


def test_the_choice_is_described_in_a_sentence() -> None:
    chosen = structure_of(Stranger(blocks(3))).chosen
    assert {"Stranger", "3", "Block", "body.layers"} <= set(re.findall(r"\w[\w.]*", chosen))


def test_two_equally_long_lists_are_an_error_that_names_both() -> None:
    two = Stranger(blocks(3), tower=blocks(3))
    with rejects("blocks", ["body.layers", "tower"], "ambiguous") as caught:
        structure_of(two)
    assert re.findall(r"'(.*?)'", caught.value.problems[0].fix) == ["body.layers.*", "tower.*"]
    both = structure_of(two, ["body.layers.*", "tower.*"])
    assert both.blocks == (*names("body.layers", 3), *names("tower", 3))


def test_the_models_method_overrides_its_lists_and_the_caller_overrides_both() -> None:
    model: Any = Stranger(blocks(3), tower=blocks(2))
    model.blocks = lambda: list(model.tower)
    assert structure_of(model) == Structure(
        ("body", "head"), names("tower", 2), (), container="", chosen=""
    )
    given = structure_of(model, "body.layers.*")
    assert given.blocks == names("body.layers", 3)
    assert given.last == ("body.norm", "head", "tower")
    model.pipeline_parts = lambda: {"first": ("a",), "blocks": "tower", "last": ("b", "a")}
    said = structure_of(model)
    assert (said.first, said.last, said.container) == (("a",), ("b", "a"), "tower")
    assert said.tied == ("a",)
    del model.blocks
    assert structure_of(model).blocks == names("tower", 2)
    model.blocks = model.body.layers  # a container in the place of the method
    assert structure_of(model).blocks == names("body.layers", 3)


def test_a_tied_head_is_at_both_ends() -> None:
    model = Stranger(blocks(2))
    model.head.weight = model.body.embedding.weight
    assert structure_of(model).tied == ("body.embedding",)


GIVEN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a pattern": ("body.layers.*", names("body.layers", 3)),
    "some-of-the-list": ("body.layers.[02]", ("body.layers.0", "body.layers.2")),
    "a star stands for one part": ("*.layers.*", names("body.layers", 3)),
    "names in the order given": (["tower.1", "body.layers.*"], ("tower.1", *names("body.layers", 3))),
    "one twice": (["tower.1", "tower.*"], ("tower.1", "tower.0")),
    "none": ([], ()),
}  # fmt: skip


@pytest.mark.parametrize("kind", GIVEN)
def test_the_caller_names_blocks(kind: str) -> None:
    model = Stranger(blocks(3), tower=blocks(2))
    given, expected = GIVEN[kind]
    assert structure_of(model, given).blocks == expected
    assert not structure_of(model, given).chosen
    if kind == "a pattern":
        assert structure_of(model, list(model.body.layers.children())).blocks == expected


REFUSED: dict[str, tuple[Any, str, str]] = {
    "no such name": ("layers.*", "layers.*", "not_found"),
    "one inside another": (["body.layers.*", "body.layers.1.up"], "body.layers.1.up", "nested"),
    "the model, too": (["", "body.layers.*"], "body.layers.0", "nested"),
    "without parameters": ("body.*", "body.rotary", "forward"),
    "a list without a forward": ("body.layers", "body.layers", "forward"),
    "of-another-model": ([nn.Linear(2, 2)], "Linear", "unregistered"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_modules_that_cannot_be_a_block_are_rejected_by_name(kind: str) -> None:
    given, value, code = REFUSED[kind]
    with rejects("blocks", value, code):
        structure_of(Stranger(blocks(3)), given)


def test_blocks_that_the_model_has_not_registered_are_rejected() -> None:
    model: Any = Stranger(blocks(2))
    model.blocks = lambda: [Block()]
    with rejects("blocks", "Block", "unregistered"):
        structure_of(model)


def test_the_planner_reads_the_same_blocks() -> None:
    profile = Profile(Stranger(blocks(3)), 16)
    assert profile.order == [0, 0, 0]
    assert [param.name for param in profile.ends(True, False).params] == ["body.embedding.weight"]
    assert [param.name for param in profile.ends(False, True).params] == [
        "body.norm.weight",
        "body.norm.bias",
        "head.weight",
    ]
    assert Profile(Stranger(blocks(3)), 16, blocks="body.layers.[12]").order == [0, 0]


def units(given: Any, report: bool, precision: str = "bf16") -> tuple[list[str], list[str]]:
    """FSDP2's units by name, and what was told of them."""
    from torch.distributed.fsdp import FSDPModule

    config = ParallelConfig(device=device().type, precision=precision)  # type: ignore[arg-type]
    model, told = Stranger(blocks(3), tower=blocks(2)), list[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(
            model, config, make_meshes(config), blocks=given, report=told.append if report else None
        )
    told += [str(w.message) for w in caught if "blocks" in str(w.message)]
    return [n for n, m in model.named_modules() if isinstance(m, FSDPModule)], told


@pytest.mark.distributed
def test_units_are_those_blocks_and_the_choice_is_logged_once() -> None:
    layers, tower = list(names("body.layers", 3)), list(names("tower", 2))
    (first, told), (second, others) = run_on_ranks(2, units, None, False)
    assert first == second == ["", *layers]
    assert told == [structure_of(Stranger(blocks(3), tower=blocks(2))).chosen]
    assert others == []  # as a warning on one rank
    assert run_on_ranks(2, units, None, True) == [(["", *layers], told)] * 2
    assert run_on_ranks(2, units, "tower.*", False) == [(["", *tower], [])] * 2


class Two(Stranger):
    def __init__(self) -> None:
        super().__init__(blocks(3), tower=blocks(3))


def in_one_process(**options: Any) -> None:
    config = ParallelConfig(device=device().type, precision="fp32", **options)
    parallelize(Two(), config, make_meshes(config))


def test_layouts_that_need_no_blocks_do_not_require_them() -> None:
    in_one_process()
    with rejects("blocks", ["body.layers", "tower"], "ambiguous"):
        in_one_process(recompute="full")


LAYOUTS = [(1, 1, 1, 1, 1, 1), (2, 1, 2, 2, 1, 2), (1, 2, 2, 1, 2, 4), (2, 3, 2, 2, 2, 8)]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_coordinates_and_groups_are_those_of_counting_row_by_row(sizes: tuple[int, ...]) -> None:
    layout = Layout(*sizes)
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    places = list(itertools.product(*(range(size) for size in sizes[:5])))
    for rank, place in enumerate(places):
        found, (pp, copy, shard, cp, tp) = layout.coordinates(rank), place
        assert [found[name] for name in names] == list(place)
        assert found["batch"] == copy * layout.dp_shard + shard
        assert found["fsdp"] == shard * layout.cp + cp
        inside = (shard * layout.cp + cp) * layout.tp + tp
        assert (found["efsdp"], found["ep"]) == divmod(inside, layout.ep)
        assert found["stage"] == rank - pp * len(places) // layout.pp
    for axis in layout.axes():
        others: dict[Any, list[int]] = {}
        for rank in range(len(places)):
            here = layout.coordinates(rank)
            apart = {
                "batch": ("pp", "cp", "tp"),
                "fsdp": ("pp", "dp_replicate", "tp"),
                "ep": ("pp", "dp_replicate", "efsdp"),
                "efsdp": ("pp", "dp_replicate", "ep"),
                "stage": ("pp",),
            }.get(axis, tuple(name for name in names if name != axis))
            others.setdefault(tuple(here[name] for name in apart), []).append(rank)
        assert sorted(layout.groups(axis)) == sorted(others.values()), axis

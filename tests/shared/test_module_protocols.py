"""A misspelled optional method is an error when the model is built or prepared; other names are free."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from forge_core import Attention, Transformer, TransformerConfig
from forge_core._shared import module_protocols
from forge_core._shared.misspelled import misspells
from forge_core._shared.module_protocols import NAMES, check_names
from forge_parallel import parallelize
from forge_testing.problems import rejects
from forge_vlm import VLM, ModalityConfig, VLMConfig
from forge_vlm.vision import ViT

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"vocab_size": 16, "dim": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16}
MISSPELLED = {
    "paralel_roles": "parallel_roles",
    "parallelRoles": "parallel_roles",
    "init_tabel": "init_table",
    "flops_per_tokens": "flops_per_token",
    "sharding_unit": "sharding_units",
    "shard_units": "sharding_units",
    "pipeline_part": "pipeline_parts",
    "host_input": "host_inputs",
    "extra_input": "extra_inputs",
    "param_kinds": "parameter_kinds",
    "parameter_kind": "parameter_kinds",
    "lr_scale": "lr_scales",
    "forward_method": "forward_methods",
    "compute_dtyp": "compute_dtype",
    "read_token_ids": "reads_token_ids",
    "needs_whole_row": "needs_whole_rows",
    "prepaer": "prepare",
}
#: Names that difflib finds near to one of ours (ratio 0.85), or differ by a letter, and are other words.
FREE = [
    "text_inputs",
    "task_inputs",
    "parallel_modules",
    "set_inputs",
    "set_input_embeddings",
    "v_head_dim",
    "block",
    "prepared",
]
TYPES = {
    "parallel_roles": {},
    "flops_per_token": property(lambda self: 1.0),
    "init_table": (),
    "host_inputs": "document_ids",
    "extra_inputs": lambda self: ("images",),
    "mask_inputs": (1,),
    "reads_token_ids": lambda self: True,
}
#: Attributes of modules that the packages look up and a module of yours does not define for Forge.
OTHERS = {
    *("_compiled_call_impl", "_orig_mod", "compiled", "in_features", "out_features"),  # of torch
    *("set_is_last_backward", "set_requires_gradient_sync"),  # of FSDP2
    *("_tp_plan", "base_model_prefix", "config", "generate", "layer_idx"),  # of transformers
    *("head", "norm", "router", "vision", "recompute_contexts"),  # of Forge's own models
}
_MODULES = [
    "model",
    "module",
    "m",
    "block",
    "stage",
    "s",
    "adapter",
    "encoder",
    "vision",
    "self.vision",
    "model.vision",
]


def module(name: str, value: Any) -> nn.Module:
    """A mixer whose class defines one more name."""
    cls = type("Wrong", (Attention,), {name: value})
    return cls(TransformerConfig(**SHAPE))


@pytest.mark.lane("quick")
@pytest.mark.parametrize(("name", "meant"), MISSPELLED.items())
def test_a_misspelled_name_is_an_error_where_a_model_is_built_or_prepared(name, meant) -> None:
    wrong = module(name, lambda self: None)
    for build in (
        lambda: Transformer(TransformerConfig(**SHAPE), mixer=lambda layer: wrong),
        lambda: parallelize(nn.Sequential(wrong)),
        lambda: parallelize(wrong),
    ):
        with rejects(f"Wrong.{name}", ..., "misspelled") as error:
            build()
        assert meant in str(error.value)


def test_the_encoder_of_a_vlm_is_checked(monkeypatch) -> None:
    monkeypatch.setattr(module_protocols, "_good", set())
    monkeypatch.setattr(ViT, "optional_input", ("masks",), raising=False)
    with rejects("ViT.optional_input", ..., "misspelled"):
        VLM(VLMConfig(**SHAPE, modalities={"image": ModalityConfig(15)}))


@pytest.mark.parametrize(("name", "value"), TYPES.items())
def test_a_name_of_another_type_is_an_error(name, value) -> None:
    with rejects(f"Wrong.{name}", ..., "type"):
        check_names(module(name, value))


def test_all_problems_of_all_classes_are_in_one_error_and_repeat() -> None:
    model = nn.Sequential(module("paralel_roles", 0), module("host_input", 0))
    for _ in range(2):
        with rejects("Wrong.paralel_roles", ..., "misspelled") as error:
            check_names(model)
        assert [p.key for p in error.value.problems] == ["Wrong.paralel_roles", "Wrong.host_input"]


def test_other_words_and_names_that_are_not_defined_are_free() -> None:
    for name in FREE:
        check_names(module(name, lambda self: None))
    for name, value in {
        "init_table": None,
        "blocks": property(lambda self: []),
        "points": 3,
    }.items():
        check_names(module(name, value))


def test_a_class_is_looked_at_once(monkeypatch) -> None:
    looked = []
    of_class = module_protocols._problems_of_class
    monkeypatch.setattr(
        module_protocols, "_problems_of_class", lambda cls: looked.append(cls) or of_class(cls)
    )
    cls = type("Layer", (nn.Linear,), {})
    model = nn.Sequential(*(cls(2, 2) for _ in range(100)))
    check_names(model)
    check_names(model)
    assert looked.count(cls) == 1


@pytest.mark.lane("quick")
def test_no_class_of_the_repository_is_near_to_a_name() -> None:
    folders = ("packages", "apps", "examples", "docs", "tests", "benchmarks")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*.py")]
    classes = [n for f in files for n in ast.walk(_tree(f)) if isinstance(n, ast.ClassDef)]
    own = {name for c in classes for node in c.body for name in _assigned(node) if name[0] != "_"}
    assert len(own) > 500
    near = {name: known for name in own - {*NAMES} for known in NAMES if misspells(name, known)}
    assert near == {}


def test_every_name_that_the_packages_look_up_in_modules_is_documented() -> None:
    read: dict[str, set[str]] = {}  # name -> the objects that it is looked up in
    words: set[str] = set()
    for package in ("core", "moe", "parallel", "vlm"):
        for file in (ROOT / f"packages/forge-{package}/src").rglob("*.py"):
            for node in ast.walk(_tree(file)) if file.name != "module_protocols.py" else ():
                if isinstance(node, ast.Attribute | ast.Constant):
                    words.add(str(getattr(node, "attr", getattr(node, "value", ""))))
                match node:
                    case ast.Call(ast.Name("getattr" | "hasattr"), [of, ast.Constant(name), *_]):
                        read.setdefault(str(name), set()).add(ast.unparse(of))

    in_modules = {name for name, of in read.items() if of & {*_MODULES}}
    assert in_modules - {*NAMES} == OTHERS
    # embeddings are found by f"get_{side}_embeddings"
    assert {n for n in {*NAMES} - words if "_embeddings" not in n} == set()


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _assigned(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a class defines."""
    if isinstance(node, ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))

"""Families of Hugging Face: the key maps of the installed packages, joined by `model_type`.

A package describes one part of models by an entry point of the group `forge.hf_families`. Its name is the part: "decoder",
"experts" (of its mixtures) or "vision" (a model with images, decoder included). Its object is {model_type: map}, and a map
has three methods, of which the first two raise ValueError with a problem for each key without an equivalent:

    config_from_hf(hf) -> config         the config of the part, from a `config.json` as a dict
    config_to_hf(config) -> dict         the keys of `config.json`
    rows_of(config) -> rows              of its tensors

Patterns of tensors in its folders that are no part of the model may stand in its `beside`.

    family = find_family(read_json("Qwen3-30B-A3B/config.json"))    # parts: decoder of forge_core, experts of forge_moe
    family = fitting_family({"decoder": TransformerConfig(...)})    # llama

Only imports and exports read the group.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from forge_ckpt._shared.name_rows import Row
from forge_ckpt._shared.problems import Problem, ProblemError, invalid, problems_of, raise_problems

GROUP = "forge.hf_families"
#: How far one misfit puts a family from a model, as errors name the nearest: other tensors are farther than a number.
_FAR = {"mixer": 4, "experts": 3, "norm": 2, "block": 2, "feed_forward": 2}
_BY_HAND = "write rows of your own and use forge_ckpt.hf.save_hf"


class HFFamily(NamedTuple):
    """All maps of one `model_type`, by part. `configs` are those of a model: {"decoder": ..., "experts": ...}."""

    name: str
    parts: Mapping[str, Any]

    @property
    def beside(self) -> tuple[str, ...]:
        """Patterns of tensors in its folders that are no part of the model, such as a tokenizer of images."""
        return tuple(p for part in self.parts.values() for p in getattr(part, "beside", ()))

    def configs_from_hf(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The config of each part, from a `config.json` as a dict; ValueError with a problem for each key that is not held."""
        return {name: part.config_from_hf(hf) for name, part in self.parts.items()}

    def configs_to_hf(self, configs: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of `config.json`; ValueError with a problem, as `decoder.norm`, for each option that it cannot hold."""
        written: dict[str, Any] = {}
        rule = "is a part of only one of the model and this family"
        alone = sorted(self.parts.keys() ^ configs.keys())
        misfits = [Problem(name, "family", ..., rule) for name in alone]
        for name in [name for name in self.parts if name in configs]:
            try:
                written |= self.parts[name].config_to_hf(configs[name])
            except ValueError as error:
                found = problems_of(error)
                misfits += [Problem(f"{name}.{p.key}", p.code, p.value, p.rule) for p in found]
        raise_problems(self.name, misfits)
        return written

    def rows_of(self, configs: Mapping[str, Any]) -> tuple[Row, ...]:
        """The rows of all tensors of a model."""
        parts = self.parts.items()
        return tuple(row for name, part in parts for row in part.rows_of(configs[name]))

    def misfits(self, configs: Mapping[str, Any]) -> tuple[Problem, ...]:
        """A problem, without a fix, for each option of a model that the family cannot hold."""
        try:
            self.configs_to_hf(configs)
        except ValueError as error:
            return problems_of(error)
        return ()


@cache
def hf_families() -> Mapping[str, HFFamily]:
    """The families of the installed packages by `model_type`. Cost: loads their maps, once."""
    found: dict[str, dict[str, Any]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        for model_type, part in point.load().items():
            found.setdefault(model_type, {}).setdefault(point.name, part)
    return {name: HFFamily(name, parts) for name, parts in found.items()}


def find_family(hf: Mapping[str, Any]) -> HFFamily:
    """The family of a `config.json` as a dict, by its model_type; ValueError for one that no installed package has."""
    name, families = hf.get("model_type"), hf_families()
    if isinstance(name, str) and name in families:
        return families[name]
    raise invalid("model_type", "unknown", name, "cannot be held", _choice(families))


def fitting_family(configs: Mapping[str, Any], wanted: str | None = None) -> HFFamily:
    """The family that holds a model: the wanted one, or the first that does.

    Raises ValueError with the options that keep the model from it, or from the nearest family.
    """
    families = {name: f for name, f in hf_families().items() if next(iter(f.parts)) in configs}
    if wanted is not None and wanted not in families:
        raise invalid("family", "unknown", wanted, "is unknown", _choice(families))
    misfits = {name: family.misfits(configs) for name, family in families.items()}
    holds = next((name for name in families if not misfits[name]), None)
    if wanted is not None and misfits[wanted]:
        fix = f"use the family {holds}" if holds else f"no other family holds the model: {_BY_HAND}"
        raise_problems(wanted, [replace(p, fix=fix) for p in misfits[wanted]])
    if name := wanted or holds:
        return families[name]
    nearest = min(families, key=lambda name: sum(map(_distance, misfits[name])), default="")
    origin = f"{nearest}, the nearest family"
    own = [replace(p, origin=origin) for p in misfits.get(nearest, ())]
    rule = "is held by no family of Hugging Face"
    raise ProblemError([Problem("model", "no_family", ..., rule, _BY_HAND), *own])


def _choice(families: Mapping[str, Any]) -> str:
    """The fix for an unknown name: the families that there are."""
    packages = "install forge-train-core, forge-moe or forge-vlm, which have families"
    return f"use one of {', '.join(families)}" if families else packages


def _distance(misfit: Problem) -> int:
    """How far a misfit puts a model from a family."""
    part, _, key = misfit.key.partition(".")
    return _FAR.get(key or part, 1)

# Copied from scripts/shared/name_rows.py; edit that file, then run scripts/copy_shared.py.
"""Rows of a name map: all rows are checked and compiled before the first tensor is read.

A row is ``(hf_pattern, forge_pattern, ops)``. ``{i}`` stands for a layer number, ``{e}`` for an
expert number. If one of our tensors is made of several Hugging Face tensors, ``hf_pattern`` is a tuple; if one
of theirs is made of several of ours, ``forge_pattern`` is one, and its only operation ``("split", dim, sizes)``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .problems import Problem, raise_problems

Op = tuple[Any, ...]
Row = tuple[str | tuple[str, ...], str | tuple[str, ...], tuple[Op, ...]]

_ARGUMENTS = {"transpose": 2, "concat": 2, "split": 2, "stack_experts": 1, "rope_permute": 1}
_FIELDS = re.compile(r"(\{[^}]*\})")
_KEY = "rows"  # key of a problem, until the number is known
_NUMBER = "0|[1-9][0-9]*"  # not "01": the way back would write "1"


@dataclass(frozen=True)
class Part:
    """The piece of a row's tensor that a name stands for: layer, expert, position in the tuple."""

    layer: int | None
    expert: int | None
    position: int


@dataclass(frozen=True)
class CompiledRow:
    """One checked row. ``experts`` is the argument of ``stack_experts``, or None.

    A split is a concat with the sides exchanged: ``hf`` are then our names, and ``forge`` is theirs.
    """

    hf: tuple[str, ...]
    forge: str
    ops: tuple[Op, ...]
    experts: int | None
    hf_regexes: tuple[re.Pattern[str], ...]
    forge_regex: re.Pattern[str]
    split: bool = False

    def hf_names(self, layer: int | None, expert: int | None) -> dict[Part, str]:
        """The Hugging Face names that make up one of our tensors, by their piece of it."""
        experts = [expert] if self.experts is None else list(range(self.experts))
        return {
            Part(layer, e, position): fill(pattern, layer, e)
            for e in experts
            for position, pattern in enumerate(self.hf)
        }


def fill(pattern: str, layer: int | None, expert: int | None) -> str:
    """``pattern`` with these numbers filled in."""
    return pattern.replace("{i}", str(layer)).replace("{e}", str(expert))


def check_rows(rows: Sequence[Row]) -> tuple[CompiledRow, ...]:
    """Validate ``rows`` and compile their patterns.

    Raises ValueError with one line per broken row: an unknown operation, a wrong number of
    arguments, numbers that appear on one side only, two rows with the same pattern.
    """
    problems: list[Problem] = []
    compiled: list[CompiledRow] = []
    seen: dict[str, int] = {}
    for number, row in enumerate(rows):
        hf, ours, ops = _names(row[0]), _names(row[1]), row[2]
        split = any(op[0] == "split" for op in ops)
        if split and len(hf) == 1 and len(ops) == 1 and not _op_problems(ops[0]):
            parts, whole, ops = ours, hf[0], (("concat", *ops[0][1:]),)
        else:
            parts, whole = hf, ours[0]

        found = _split_problems(hf, ours, ops) or _row_problems(parts, whole, ops)
        for pattern in (*(f"hf {name}" for name in hf), *(f"forge {name}" for name in ours)):
            if pattern in seen:
                rule = f"is already in row {seen[pattern]}"
                found.append(Problem(_KEY, "duplicate", pattern, rule))
            seen[pattern] = number
        names = f"{', '.join(hf)} -> {', '.join(ours)}"
        problems += [replace(p, key=f"rows.{number}", origin=names) for p in found]

        if not found:
            experts = next((op[1] for op in ops if op[0] == "stack_experts"), None)
            regexes = tuple(_regex(pattern) for pattern in parts)
            row_of = CompiledRow(parts, whole, ops, experts, regexes, _regex(whole), split)
            compiled.append(row_of)
    raise_problems("", problems)
    return tuple(compiled)


def hf_name(rows: Sequence[Row], name: str) -> str | None:
    """The Hugging Face name of one of our tensors that is the same tensor there; None if the rows rearrange it, or
    do not know it."""
    for row in check_rows(rows):
        found = row.forge_regex.fullmatch(name)
        if found is not None and not row.ops and not row.split:
            numbers = {key: int(value) for key, value in found.groupdict().items()}
            return fill(row.hf[0], numbers.get("i"), numbers.get("e"))
    return None


def _names(patterns: str | tuple[str, ...]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _split_problems(
    hf: tuple[str, ...], forge: tuple[str, ...], ops: tuple[Op, ...]
) -> list[Problem]:
    """A row with several of our names, or with a split that was not turned into a concat."""
    if any(op[0] == "split" for op in ops):
        rule = "must be the only operation, of one hf pattern, as ('split', dim, sizes)"
        return [Problem(_KEY, "split", ops, rule)]
    if len(forge) > 1 and (len(hf) > 1 or not any(op[0] == "concat" for op in ops)):
        rule = f"forge patterns need exactly one split of {len(forge)}"
        return [Problem(_KEY, "forge_patterns", len(forge), rule)]
    return []


def _regex(pattern: str) -> re.Pattern[str]:
    groups = {"{i}": f"(?P<i>{_NUMBER})", "{e}": f"(?P<e>{_NUMBER})"}
    pieces = _FIELDS.split(pattern)
    return re.compile("".join(groups.get(piece, re.escape(piece)) for piece in pieces))


def _row_problems(hf: tuple[str, ...], forge: str, ops: tuple[Op, ...]) -> list[Problem]:
    problems = [problem for op in ops for problem in _op_problems(op)]
    for pattern in (*hf, forge):
        fields = _FIELDS.findall(pattern)
        fix = "write {i} for the layer, {e} for the expert"
        problems += [
            Problem(_KEY, "field", pattern, f"has {field}", fix)
            for field in sorted(set(fields) - {"{i}", "{e}"})
        ]
        if len(set(fields)) != len(fields):
            problems.append(Problem(_KEY, "twice", pattern, "has a number twice", "use each once"))
    if len({"{i}" in pattern for pattern in (*hf, forge)}) > 1:
        fix = "write it in every pattern"
        problems.append(Problem(_KEY, "layer", "{i}", "is on one side only", fix))
    if problems:
        return problems

    counts = {name: sum(op[0] == name for op in ops) for name in ("concat", "stack_experts")}
    if len(hf) > 1 or counts["concat"]:
        parts = [op[2] if isinstance(op[2], int) else len(op[2]) for op in ops if op[0] == "concat"]
        if parts != [len(hf)]:
            rule = f"hf patterns need exactly one concat of {len(hf)}"
            problems.append(Problem(_KEY, "concat", len(hf), rule))

    in_hf = {"{e}" in pattern for pattern in hf}
    if len(in_hf) > 1:
        fix = "write it in all of them or none"
        problems.append(Problem(_KEY, "some_experts", "{e}", "is in some hf patterns only", fix))
    elif counts["stack_experts"] != int(in_hf == {True} and "{e}" not in forge):
        rule = "in hf and not in forge needs exactly one stack_experts, and only then"
        problems.append(Problem(_KEY, "stack_experts", "{e}", rule))
    elif "{e}" in forge and in_hf == {False}:
        rule = "is in forge only, and one hf tensor cannot become several of ours"
        problems.append(Problem(_KEY, "forge_experts", "{e}", rule))
    return problems


def _op_problems(op: Op) -> list[Problem]:
    name, arguments = op[0], op[1:]
    if name not in _ARGUMENTS:
        fix = f"use one of {', '.join(sorted(_ARGUMENTS))}"
        return [Problem(_KEY, "unknown", name, "is not an operation", fix)]
    if len(arguments) != _ARGUMENTS[name]:
        return [Problem(_KEY, "length", op, f"must have {_ARGUMENTS[name]} arguments")]
    if name in ("concat", "split") and isinstance(arguments[1], tuple):
        arguments = (arguments[0], *arguments[1])
    if not all(type(argument) is int for argument in arguments):
        return [Problem(_KEY, "type", op, "must have integers as arguments")]
    if name in ("stack_experts", "rope_permute") and arguments[0] < 1:
        return [Problem(_KEY, "range", op, "must have an argument of at least 1")]
    return []

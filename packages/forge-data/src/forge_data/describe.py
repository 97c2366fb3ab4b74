"""What is known of the sources of a configuration before a run begins, as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from forge_data.config import DataConfig
from forge_data.errors import InvalidData
from forge_data.kinds import is_streamed
from forge_data.packing_config import PackingConfig
from forge_data.packing_plan import plan_rows
from forge_data.phases import phase_segments
from forge_data.sources.open import open_header
from forge_data.tokenizer import describe_ends, load_tokenizer

__all__ = ["data_lines", "ends_of_documents", "planned_rows"]

#: Kinds that make their own rows, whatever the packing is, so that no plan of it holds for them.
_OWN_ROWS = ("chat",)
_PLANNED_AT_ONCE = 1 << 18  # documents: planned in half a second, so that the lines come soon


def data_lines(data: DataConfig) -> Iterator[str]:
    """All lines about the sources. Cost: their headers are read, and small ones are planned; nothing is written.

    Raises InvalidData for files that cannot be read.
    """
    yield from _source_lines(data)
    yield from ends_of_documents(data)
    yield from planned_rows(data)


def ends_of_documents(data: DataConfig) -> Iterator[str]:
    """A line for each source of a tokenizer file: the tokens that begin and end its documents, and why; of conversations
    those that end a text."""
    for name, source in data.sources.items():
        header = open_header(source)
        if header.tokenizer is None:
            continue
        if source.name in _OWN_ROWS:
            spec = header.tokenizer
            found = " or ".join(end for end in (spec["eos"], *spec.get("ends", ())) if end)
            yield f"data.sources.{name}: a text ends with {found or 'no token'} (eos_token, chat template)"
            continue
        ends = getattr(header, "ends", "") or describe_ends(load_tokenizer(header.tokenizer))
        if ends:
            yield f"data.sources.{name}: documents {ends}"


def _source_lines(data: DataConfig) -> Iterator[str]:
    """One line for each source; for a source that a run tokenizes, what the cache has of it."""
    for name, source in data.sources.items():
        if is_streamed(source):
            yield f"data.sources.{name}: its tokens are not counted, as it is read while the run trains"
        elif (summary := getattr(open_header(source), "summary", None)) is not None:
            yield f"data.sources.{name}: {summary()}"


def planned_rows(data: DataConfig) -> Iterator[str]:
    """A line for each source and length of rows that `data.packing` plans: rows, padding and cut documents, where a plan of
    its documents takes a second at most. None for a packing without plan."""
    if data.packing.name == "concatenate":
        return
    for name, source in data.sources.items():
        header = open_header(source)
        if source.name in _OWN_ROWS or is_streamed(source) or hasattr(header, "stream"):
            continue
        for seq_len in sorted({segment.seq_len for segment in phase_segments(data)}):
            try:
                rows = _rows_of(header, seq_len, data.packing)
            except InvalidData as error:
                # files without digests are read for their documents, and may be damaged
                problems = [problem.under(f"data.sources.{name}") for problem in error.problems]
                raise InvalidData(problems, error.where) from error
            yield f"data.sources.{name}: {data.packing.name}, {rows}"


def _rows_of(source: Any, seq_len: int, packing: PackingConfig) -> str:
    if not hasattr(source, "documents"):
        return f"rows of {seq_len} tokens are planned when `forge-train run` has tokenized it"
    if source.num_documents > _PLANNED_AT_ONCE:
        return f"rows of {seq_len} tokens are planned by `forge-train run` for {source.num_documents:,} documents"
    lengths = np.diff(np.append(source.documents, source.num_tokens))
    plan = plan_rows(lengths, seq_len, packing.name, packing.window)
    return (
        f"{plan.num_rows:,} rows of {seq_len} tokens, {1 - plan.utilization:.2%} of them padding, "
        f"{plan.num_cut:,} documents cut"
    )

"""Sets of the `datasets` library: loaded by folder or name, with errors of one line and without progress bars."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_data.errors import InvalidData

if TYPE_CHECKING:
    from forge_data.config import SourceConfig

__all__ = [
    "check_column",
    "is_saved",
    "load_set",
    "no_text",
    "one_sentence",
    "require_library",
    "without_bars",
]


@contextlib.contextmanager
def one_sentence(path: str | None) -> Iterator[None]:
    """Errors of the library, whose classes are many, as InvalidData of one line."""
    try:
        yield
    except InvalidData:
        raise
    except MemoryError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        said = f"{type(cause).__name__}: {lines[0] if lines else 'no reason given'}"
        raise InvalidData(
            f"{path} must be a set that datasets can load ({said[:300]}); check path, configuration and split"
        ) from error


@contextlib.contextmanager
def without_bars(datasets: Any) -> Iterator[None]:
    """No progress bars of the library: every rank would draw them."""
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def load_set(config: SourceConfig) -> Any:
    """The `datasets.Dataset` of a source: saved by save_to_disk, a folder of data files, or a name of the hub.

    Raises ValueError if the library is missing, InvalidData if it cannot load the set, and for a split that is not there.
    """
    require_library()
    import datasets

    table, path = config.huggingface, Path(str(config.path))
    split = table.split or config.split
    with one_sentence(config.path), without_bars(datasets):
        if not is_saved(path):
            return datasets.load_dataset(str(config.path), table.config_name, split=split)
        found = datasets.load_from_disk(str(path))
    if table.config_name is not None:
        raise InvalidData(
            f"{path} was saved to disk and has no configurations; remove huggingface.config_name"
        )
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise InvalidData(
                f"{path} must have the split {split!r}, and has {', '.join(found)}; name one in huggingface.split"
            )
        return found[split]
    if split != "train":
        raise InvalidData(
            f"{path} is one set without splits, so there is no {split!r}; give it a path of its own with split train"
        )
    return found


def check_column(where: Any, names: Sequence[str], field: str, kind: Callable[[], str]) -> None:
    """Raise InvalidData unless `field` is among the names of columns, and of a `kind` that holds strings."""
    if field not in names:
        known = ", ".join(names)[:200] or "none"
        raise InvalidData(
            f"{where} must have a column {field!r}, and has {known}; name its text in huggingface.text_field"
        )
    if kind() not in ("string", "large_string", "string_view", "null"):
        raise InvalidData(
            f"{where} column {field!r} must hold text, and holds {kind()}; name another in huggingface.text_field"
        )


def no_text(where: Any, row: int, field: str) -> InvalidData:
    """The error of a row without a string."""
    return InvalidData(
        f"{where} row {row} has no {field!r}, which must be a string; leave the row out"
    )


def require_library() -> None:
    """Raise ValueError if the library is missing."""
    found = None
    with contextlib.suppress(ImportError):
        found = importlib.util.find_spec("datasets")
    if found is None:
        raise ValueError(
            "name 'huggingface' needs the datasets library, which is not installed; "
            "pip install 'forge-data[huggingface]'"
        )


def is_saved(path: Path) -> bool:
    """Whether save_to_disk wrote a folder."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))

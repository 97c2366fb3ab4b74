"""Load sets of the `datasets` library by folder or name, with errors of one line and without progress bars."""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_data._shared.paths import user_path
from forge_data._shared.problems import invalid
from forge_data._shared.table_files import check_saved_set
from forge_data.errors import InvalidData, invalid_data

if TYPE_CHECKING:
    from forge_data.config import SourceConfig

__all__ = [
    "find_builder",
    "is_saved",
    "load_saved",
    "load_set",
    "name_for_library",
    "one_sentence",
    "require_library",
    "root_name",
    "without_bars",
]


@contextlib.contextmanager
def one_sentence(path: str | None) -> Iterator[None]:
    """Turn errors of the library, of many classes, into InvalidData of one line."""
    try:
        yield
    except (InvalidData, MemoryError):
        raise
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, InvalidData):
            raise cause from None

        # all lines: the first may be "Couldn't cast", and the columns follow
        reason = " ".join(str(cause).split()) or "no reason given"
        shown = f"{type(cause).__name__}: {reason}"[:300]
        rule = f"must be a set that datasets can load ({shown})"
        fix = "check path, configuration and split"
        raise invalid_data("path", "not_loaded", path, rule, fix) from error


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

    table, path = config.huggingface, user_path(str(config.path))
    split = table.split or config.split

    with one_sentence(config.path), without_bars(datasets):
        if not is_saved(path):
            if path.is_dir() and os.path.expandvars(name := str(path.absolute())) != name:
                rule = "must not hold the name of an environment variable, which datasets replaces"
                raise invalid_data("path", "variable", name, rule, "rename it")
            with name_for_library(path) as name:
                builder = find_builder(name, config)
                builder.download_and_prepare()
            return builder.as_dataset(split=split)
        found = load_saved(path)

    if table.config_name is not None:
        key, rule = "huggingface.config_name", f"must not be given, as {path} was saved to disk"
        raise invalid_data(key, "excludes", table.config_name, rule, "remove it")
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            rule = f"must be a split of {path}, which has {', '.join(found)}"
            fix = "name one in huggingface.split"
            raise invalid_data("split", "unknown", split, rule, fix)
        return found[split]

    if split != "train":
        rule = f"must be 'train', as {path} is one set without splits"
        fix = "give it a path of its own with split train"
        raise invalid_data("split", "one_split", split, rule, fix)
    return found


def load_saved(folder: Path) -> Any:
    """What save_to_disk wrote in a folder; errors of the library as they are, InvalidData where it would read fewer rows."""
    import datasets

    name = root_name(folder)
    check_saved_set(folder, InvalidData)
    return datasets.load_from_disk(name)


@contextlib.contextmanager
def name_for_library(path: Path) -> Iterator[str]:
    """What the library is given for a folder, or for the name of a set, while it looks for files.

    A folder that exists is named from the root: the library prefers its builders, as `json`, to folders of that name. It
    puts the resolved name before patterns of file names, so `*?[` in it and in folders above are escaped there.
    """
    from datasets import data_files

    if not path.is_dir():
        yield str(path)
        return
    name = root_name(path)
    resolve_pattern = data_files.resolve_pattern

    def resolve_below(pattern: str, base_path: str, *args: Any, **options: Any) -> list[str]:
        base_path = base_path if "://" in base_path else glob.escape(base_path)
        return resolve_pattern(pattern, base_path, *args, **options)

    data_files.resolve_pattern = resolve_below
    try:
        yield name
    finally:
        data_files.resolve_pattern = resolve_pattern


def find_builder(name: str, config: SourceConfig) -> Any:
    """The library's builder of a set, found by the name of `name_for_library`; of JSON it reads the column of text only."""
    import datasets

    from forge_data.io.json_text import Json, TextOfJson

    table = config.huggingface
    if not Path(name).is_absolute() and not datasets.config.HF_HUB_OFFLINE:
        _announce(name, table.streaming)
    builder = datasets.load_dataset_builder(name, table.config_name)
    if isinstance(builder, Json):
        # `features` also keep what is read here apart in the library's cache.
        features = datasets.Features({table.text_field: datasets.Value("string")})
        builder = datasets.load_dataset_builder(name, table.config_name, features=features)
        builder.__class__ = TextOfJson
    return builder


@functools.cache
def _announce(name: str, streams: bool) -> None:
    """Print once, in the first process of a machine, that a set of the Hub is fetched: nothing else of a job is."""
    from datasets import config

    if int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0):
        return
    what = "streaming" if streams else f"downloading, where {config.HF_DATASETS_CACHE} lacks it:"
    line = f"forge-data: {what} set {name!r} of {config.HF_ENDPOINT}; HF_HUB_OFFLINE=1 forbids it"
    print(line, file=sys.stderr, flush=True)


def root_name(path: Path) -> str:
    """A folder named from the root, as the library expands `~ada`. Raises InvalidData for `::`, which it divides at."""
    if "::" in (name := str(path.absolute())):
        rule, fix = "must not hold '::', which datasets takes for a chain of addresses", "rename it"
        raise invalid_data("path", "chain", name, rule, fix)
    return name


def require_library(key: str = "name", value: str = "huggingface") -> None:
    """Raise ValueError if the library is missing."""
    found = None
    with contextlib.suppress(ImportError):
        found = importlib.util.find_spec("datasets")
    if found is None:
        rule = "needs the datasets library, which is not installed"
        raise invalid(key, "requires", value, rule, "pip install 'forge-data[huggingface]'")


def is_saved(path: Path) -> bool:
    """Whether save_to_disk wrote a folder."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))

"""Configuration files in layers: base files, the file itself, flags, with the origin of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_train._shared.paths import user_path
from forge_train._shared.problems import invalid, problems_of
from forge_train._shared.toml_files import flatten, read_toml
from forge_train.errors import ConfigError

LENGTH_KEYS = ("steps", "tokens", "tokens_per_parameter")
#: Encoders that have one table of options.
_ONE_TABLE = ("vit", "packed_vit")
_MAX_FILES = 16


@dataclass
class Layers:
    """Merged raw values and, for each dotted key, where the value came from."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def add(self, layer: Mapping[str, Any], origin: str) -> None:
        """Merge `layer` over the values: tables key by key, everything else is replaced."""
        for dotted, value in flatten(layer):
            self.set(dotted, value, origin)

    def set(self, dotted: str, value: Any, origin: str) -> None:
        """Set one key, and drop what earlier layers gave to the choice that it replaces."""
        for other in self._replaced_by(dotted, value):
            self.drop_table(other, kept=origin)
        *parents, last = dotted.split(".")
        table = self.values
        for parent in parents:
            if not isinstance(table.get(parent), dict):
                table[parent] = {}
            table = table[parent]
        table[last] = value
        self.origins[dotted] = origin

    def at(self, dotted: str) -> Any:
        """The value or table of a dotted key, or None."""
        found: Any = self.values
        for part in dotted.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def drop_table(self, dotted: str, kept: str | None = None) -> None:
        """Remove a key or table, as if no layer had it, but for keys whose origin is `kept`."""
        for key in [k for k in self.origins if f"{k}.".startswith(f"{dotted}.")]:
            if self.origins[key] != kept:
                self._drop(key)

    def replace_old_keys(self) -> None:
        """Turn keys of version 0.1 into those of today."""
        names = self.at("train.callbacks")
        if isinstance(names, list | tuple):
            origin = self._drop("train.callbacks")
            for number, name in enumerate(names, 1):
                self.set(f"callbacks.list_{number}.name", name, origin)
        skipped = self.at("train.max_skipped_steps")
        if type(skipped) is int:
            origin = self._drop("train.max_skipped_steps")
            new = {"action": "skip", "max_in_a_row": skipped} if skipped else {"action": "stop"}
            for key, value in new.items():
                if f"resilience.nonfinite.{key}" not in self.origins:  # the new key wins
                    self.set(f"resilience.nonfinite.{key}", value, origin)

    def _replaced_by(self, dotted: str, value: Any) -> Sequence[str]:
        """Keys and tables that mean nothing once a key has a value: other lengths, and options of another choice.

        Those of `x.name = "wsd"` are `x.options` and `x.wsd`, those of a key `y` are `y_options`; a model has all of its
        section.
        """
        section, _, last = dotted.rpartition(".")
        if section == "train" and last in LENGTH_KEYS:
            return [f"train.{key}" for key in LENGTH_KEYS if key != last]
        before = self.at(dotted)
        if dotted == "model.name":
            return [] if value == (before or "transformer") else ["model"]
        if before in (None, value) or (before in _ONE_TABLE and value in _ONE_TABLE):
            return []
        named = last == "name"
        return [f"{section}.options", f"{section}.{before}"] if named else [f"{dotted}_options"]

    def _drop(self, dotted: str) -> str:
        """Remove a key, and tables below a section that it leaves empty; the origin of its value."""
        *parents, last = dotted.split(".")
        tables: list[Any] = [self.values]
        for parent in parents:
            tables.append(tables[-1].get(parent, {}) if isinstance(tables[-1], dict) else {})
        tables[-1].pop(last, None)
        for depth in range(len(parents) - 1, 0, -1):
            if not tables[depth + 1]:
                tables[depth].pop(parents[depth], None)
        return self.origins.pop(dotted, "")


def read_layers(path: str | Path) -> Layers:
    """`path` laid over the file its `extends` names, and so on.

    Raises ConfigError for a missing file, invalid TOML, or circular `extends`.
    """
    layers, path = Layers(), user_path(path)
    for file, table in reversed(list(_chain(path))):
        layers.add(table, str(file) if file == path else f"base {file}")
    return layers


def _chain(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    seen: list[Path] = []
    current: Path | None = path
    while current is not None:
        by = f" (extends of {seen[-1]})" if seen else ""
        try:
            table = read_toml(current)
        except ValueError as error:
            raise ConfigError(problems_of(error), f"{current}{by}") from error
        if current.resolve() in [p.resolve() for p in seen]:
            circle = " -> ".join(map(str, [*seen, current]))
            rule, fix = f"is circular: {circle}", "a base file must not extend its own child"
            raise invalid("extends", "circular", ..., rule, fix, kind=ConfigError)
        if len(seen) == _MAX_FILES:
            rule = f"leads through more than {_MAX_FILES} files"
            raise invalid("extends", "depth", ..., rule, "merge some", where=path, kind=ConfigError)

        base = table.pop("extends", None)
        if base is not None and not isinstance(base, str):
            rule = "must be the path of one TOML file"
            raise invalid("extends", "type", base, rule, where=current, kind=ConfigError)
        seen.append(current)
        yield current, table
        current = None if base is None else current.parent / user_path(base)

"""Another name of the shared topic."""

from forge_train._shared.toml_files import read_toml

__all__ = ["read_toml"]

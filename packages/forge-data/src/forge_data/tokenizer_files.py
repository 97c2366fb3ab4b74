"""Tokenizers in folders of transformers: their files, their end tokens, and whether they give the same ids.

gives_same_ids(source.tokenizer, Path("Qwen3-0.6B/tokenizer.json"))
TokenizerFiles(load_tokenizer(source.tokenizer)).files()        # what an export carries
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from forge_data._shared.paths import read_regular
from forge_data.chat.template import ChatTemplate
from forge_data.errors import InvalidData, invalid_data
from forge_data.protocols import Tokenizer
from forge_data.tokenizer import JsonTokenizer

__all__ = [
    "TOKENIZER_FILES",
    "ChatTemplate",
    "TokenizerFiles",
    "as_json",
    "ends_beside",
    "folder_ends",
    "gives_same_ids",
    "tokenizer_in",
]

#: Names that folders of transformers have for a tokenizer and its chat template.
TOKENIZER_FILES = (
    *("tokenizer*.json", "tokenizer.model", "vocab.*", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.*", "*.tiktoken", "spiece.model"),
)
_CONFIG, _MAP, _TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
#: A processor of transformers has its chat template here, too, where it would contradict another one.
_OTHER_TEMPLATE = "chat_template.json"
_NO_FILE = "no tokenizer is written: tokens are bytes, which transformers has no file for"
_NO_TEMPLATE = "no chat template is written: the template plain leaves questions out"
_FILE, _GENERATION = "tokenizer.json", "generation_config.json"
#: Parts of the file that decide about ids. The rest is about what goes around a text, and how ids are shown.
_PARTS = ("model", "normalizer", "pre_tokenizer", "added_tokens")
_MAX_BYTES = 2**28


class TokenizerFiles(NamedTuple):
    """The files of transformers for the tokenizer of data, and how its conversations are written, if it has some.

    template: of jinja, None for that of the tokenizer's own files, "" for none. `talks`: whether there are conversations.
    """

    tokenizer: Tokenizer
    template: str | None = None
    talks: bool = False

    @property
    def spec(self) -> dict[str, Any]:
        """Plain data that names the file."""
        return self.tokenizer.spec()

    @property
    def note(self) -> str | None:
        """What is not written."""
        missing = _NO_TEMPLATE if self.template == "" else None
        return _NO_FILE if self.spec["name"] != "json" else missing or self._begin_note()

    def _begin_note(self) -> str | None:
        """That the files of the tokenizer begin a text by other tokens than the data has, where `bos` chose them."""
        begin: Any = getattr(self.tokenizer, "begin", None)
        own = JsonTokenizer(self.spec["path"], eos="").begin
        if self.talks or begin is None or begin.tokens == own.tokens:
            return None
        data, files = (
            ", ".join(name for _, name in found.tokens) or "no token" for found in (begin, own)
        )
        return f"texts of the data began with {data}, those of the exported tokenizer begin with {files}"

    def files(self) -> dict[str, bytes]:
        """The files by name; none for bytes. InvalidData for a file over 256 MiB."""
        if self.spec["name"] != "json":
            return {}
        path = Path(self.spec["path"])
        found = {"tokenizer.json": path.read_bytes()}
        if path.name == "tokenizer.json":
            found = {
                file.name: read_regular(file, _MAX_BYTES, InvalidData)
                for file in sorted(path.parent.iterdir())
                if file.is_file() and _is_file(file.name)
            }

        config = _table(found.get(_CONFIG)) or {"tokenizer_class": "PreTrainedTokenizerFast"}
        end = self.spec.get("eos")
        changes: dict[str, Any] = {"eos_token": end} if end and _name(config, "eos") != end else {}
        if changes and _MAP in found:
            found[_MAP] = as_json({**_table(found[_MAP]), **changes})

        if self.template is not None:
            changes["chat_template"] = self.template or None
            found.pop(_OTHER_TEMPLATE, None)
            found[_TEMPLATE] = self.template.encode()
        if changes or _CONFIG not in found:
            found[_CONFIG] = as_json({k: v for k, v in {**config, **changes}.items() if v is not None})  # fmt: skip
        return {name: content for name, content in found.items() if name != _TEMPLATE or content}

    def ids(self, kept: Path) -> dict[str, Any]:
        """Keys of config.json: its end tokens, with those of the folder `kept` where that has the tokenizer.

        Of conversations also the tokens that begin and fill up texts, where the tokenizer's files name them.
        """
        ends = [*dict.fromkeys((*ends_beside(self.spec, kept), *self.tokenizer.end_ids))]
        found: dict[str, Any] = {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
        if self.talks and self.spec["name"] == "json":
            config = _table(self.files().get(_CONFIG))
            vocabulary = self.tokenizer.vocabulary()  # type: ignore[attr-defined]
            for name in ("bos", "pad"):
                if (token := vocabulary.get(_name(config, name))) is not None:
                    found[f"{name}_token_id"] = token
        return found

    def put(
        self, hf: dict[str, Any], files: dict[str, bytes], kept: Path, *, with_files: bool
    ) -> None:
        """Write `ids` into the keys of a `config.json` and into the generation_config.json among `files`.

        with_files: `files` of the tokenizer replace those that are there.
        """
        ids = self.ids(kept)
        if with_files:
            for name in [name for name in files if _is_file(name)]:
                del files[name]
            files |= self.files()
        for table in (hf, hf.get("text_config")):
            if isinstance(table, dict):
                table |= ids
        before = _table(files.get(_GENERATION))
        if {**before, **ids} != before:
            files[_GENERATION] = as_json({**before, **ids})

    def identity(self) -> tuple[Any, ...]:
        """What must be alike in data of one export: ids, end token, template."""
        files = self.files()
        template = self.template
        if template is None:
            config = _table(files.get(_CONFIG))
            own = files[_TEMPLATE].decode() if _TEMPLATE in files else config.get("chat_template")
            template = json.dumps(own) if isinstance(own, list) else own
        return self.spec.get("fingerprint"), self.spec.get("eos"), template


def ends_beside(spec: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """`folder_ends` of a folder that has the tokenizer of the spec; none of another."""
    path = tokenizer_in(folder)
    return folder_ends(folder) if path is not None and gives_same_ids(spec, path) else ()


def folder_ends(folder: Path) -> tuple[int, ...]:
    """Ids that end a text in `generate` of transformers: of generation_config.json, otherwise of config.json.

    Raises InvalidData for something else than an id or a list of them.
    """
    for path in (folder / _GENERATION, folder / "config.json"):
        table = _read(path) if path.is_file() else {}
        if table is None:
            raise invalid_data("", "not_json", ..., "is not JSON", "correct it", where=path)
        for part in (table, table.get("text_config") or {}):
            if (ends := part.get("eos_token_id")) is None:
                continue
            found = ends if isinstance(ends, list) else [ends]
            if not all(type(end) is int for end in found):
                rule, fix = "must be an id or a list of ids", "correct the file"
                raise invalid_data("eos_token_id", "type", ends, rule, fix, where=path)
            return tuple(found)
    return ()


def tokenizer_in(folder: Path) -> Path | None:
    """The tokenizer's file in a folder of Hugging Face; None without one that the library tokenizers reads."""
    path = folder / _FILE
    # os.path.isfile is False for a name that is too long, where Path.is_file may raise
    return path if os.path.isfile(path) and _parts(path) is not None else None


def gives_same_ids(spec: Mapping[str, Any], path: Path) -> bool:
    """Whether the tokenizer of a spec gives the ids that the file `path` gives, as far as their parts tell.

    A file that was written again, by another version of the library, may be the same one. A false "no" is possible, a
    false "yes" is not.
    """
    if spec["name"] != "json":
        return False
    if spec.get("fingerprint") == hashlib.sha256(path.read_bytes()).hexdigest():
        return True
    own = Path(spec["path"])
    return own.is_file() and _parts(own) == _parts(path)


def _parts(path: Path) -> dict[str, Any] | None:
    """What decides about ids, without keys that are off; None for a file that is no tokenizer."""
    table = _read(path)
    model = (table or {}).get("model")
    if table is None or not isinstance(model, dict):
        return None
    model = {key: value for key, value in model.items() if value not in (None, False)}
    # by the version of the library pairs, or texts of two words
    if isinstance(model.get("merges"), list):
        model["merges"] = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    return {**{part: table.get(part) for part in _PARTS}, "model": model}


def _read(path: Path) -> dict[str, Any] | None:
    """The object of a JSON file; None for a file that has none."""
    try:
        table = json.loads(read_regular(path, _MAX_BYTES, InvalidData))
    except (ValueError, RecursionError):
        return None
    return table if isinstance(table, dict) else None


def _is_file(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in TOKENIZER_FILES)


def _name(config: Mapping[str, Any], key: str) -> Any:
    """The text of a special token, which stands by itself or in a table."""
    token = config.get(f"{key}_token")
    return token.get("content") if isinstance(token, dict) else token


def _table(content: bytes | None) -> dict[str, Any]:
    found = {} if content is None else json.loads(content)
    return found if isinstance(found, dict) else {}


def as_json(table: Mapping[str, Any]) -> bytes:
    """The content of a file."""
    return (json.dumps(table, indent=2, sort_keys=True) + "\n").encode()

"""The tokenizer that an export carries: that of the training data, with its chat template and its end tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from forge_data import (
    DataConfig,
    JsonTokenizer,
    SourceConfig,
    Tokenizer,
    load_tokenizer,
    open_header,
)
from forge_data.chat.template import ChatTemplate
from forge_train._shared.problems import invalid
from forge_train.config.exact_match import KINDS
from forge_train.config.tokenizer import ends_beside
from forge_train.errors import ConfigError
from forge_train.hf.folder import TOKENIZER_FILES, files_in
from forge_vlm.data import Prompts
from forge_vlm.data.templates import JINJA

_CONFIG, _MAP, _TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
#: What a processor has its chat template in, too.
_OTHER_TEMPLATE = "chat_template.json"
_NO_FILE = "no tokenizer is written: tokens are bytes, which transformers has no file for"
_NO_TEMPLATE = "no chat template is written: the template plain leaves questions out"


class Tokenizing(NamedTuple):
    """The tokenizer of a run's data, and how its conversations are written, if it has some.

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
        return f"texts of the run began with {data}, those of the exported tokenizer begin with {files}"

    def files(self) -> dict[str, bytes]:
        """The files of transformers, by name; none for bytes. ConfigError for a file that is no such file by its size."""
        if self.spec["name"] != "json":
            return {}
        path = Path(self.spec["path"])
        found = {"tokenizer.json": path.read_bytes()}
        if path.name == "tokenizer.json":
            found = files_in(path.parent, TOKENIZER_FILES)
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


def is_talks(source: SourceConfig) -> bool:
    """Whether a source has conversations."""
    return source.name == "chat" or source.name in KINDS


def tokenizing_of(data: DataConfig, chosen: str | None) -> Tokenizing:
    """That of the source `chosen`, otherwise of the conversations, otherwise of the first source.

    Raises ConfigError for a source without conversations, and for conversations of several templates of which none is
    chosen; ValueError, OSError and ImportError for files and packages that are missing.
    """
    talks = {n: s for n, s in data.sources.items() if is_talks(s)}
    if chosen is not None and chosen not in talks:
        rule = f"must be a source of conversations: {', '.join(talks) or 'the run has none'}"
        raise invalid("--template", "unknown", chosen, rule, "name one", kind=ConfigError)
    if not talks:
        header = open_header(next(iter(data.sources.values())))
        return Tokenizing(load_tokenizer(header.tokenizer or {}))
    found = {name: _of_talks(talks[name]) for name in ([chosen] if chosen else talks)}
    first, *others = found.values()
    if any(_written(other) != _written(first) for other in others):
        rule = "is not given, and these sources write conversations differently"
        fix = (
            f"name the source whose template the export shall have: --template {next(iter(found))}"
        )
        raise invalid("--template", "several", [*found], rule, fix, kind=ConfigError)
    return first


def _of_talks(source: SourceConfig) -> Tokenizing:
    if source.name == "chat":
        chat = ChatTemplate(source.chat)
        return Tokenizing(load_tokenizer(chat.spec()), chat.template, True)
    options = {key: value for key, value in source.options.items() if key != "format"}
    prompts = Prompts.of_source(source.path or "", **options)
    tokens, template = prompts.tokens, JINJA.get(prompts.options["template"])
    spec: Mapping[str, Any] = tokens.spec or {}
    values = {"eos": spec.get("eos", ""), "bos": "".join(tokens.begin), "image": tokens.image}
    for key, value in values.items():
        template = template and template.replace(f"<<{key}>>", json.dumps(value))
    return Tokenizing(load_tokenizer(spec), template, True)


def _written(found: Tokenizing) -> tuple[Any, ...]:
    """What must be alike in sources of one export."""
    files = found.files()
    template = found.template
    if template is None:
        config = _table(files.get(_CONFIG))
        own = files[_TEMPLATE].decode() if _TEMPLATE in files else config.get("chat_template")
        template = json.dumps(own) if isinstance(own, list) else own
    return found.spec.get("fingerprint"), found.spec.get("eos"), template


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

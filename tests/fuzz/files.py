"""The text and the data files of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tomlkit
from tests.fuzz.axes_images import PLACEHOLDER
from tests.fuzz.files_images import with_discrete_images, write_conversations
from tests.fuzz.job import Job

#: Kinds of sources whose documents are those of `token_documents`.
TOKEN_FILES = ("npy", "nanogpt", "tokens")
#: The kind of a source of conversations about images.
IMAGES = "images"
#: Ids that end and begin documents of token files; no other token of a document has them.
END, BEGIN, FIRST = 1, 2, 3
_ROLES = ("user", "assistant")
_SPECIALS = ("<pad>", "<end>", "<user>", "<assistant>", "<unk>")
#: Words of conversations, after the special tokens.
_WORDS = [f"w{i}" for i in range(40)]
_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def sources_of(job: Job) -> dict[str, tuple[str, int]]:
    """The table of each source that the job reads, with its kind and about how many rows it has."""
    rows, number = job.sizes["rows"], {"one": 1, "ending": 3}.get(job["sources"], 2)
    images = job.has("images") and not job.has("image tokens")
    first = IMAGES if images else job["source"]
    parts = {"a": (first, 1), "b": ("npy", 3), "c": ("nanogpt", 5)}
    alike = job["sources"] in ("one", "weighted")
    found = {
        f"data.sources.{name}": (kind, rows if alike else max(2, rows // part))
        for name, (kind, part) in list(parts.items())[:number]
    }
    if job.has("validation") and not job.is_without("eval.every_steps"):
        found["data.validation"] = (first, 5)
        if job["validation"] == "sets":
            found["eval.sets.held"] = (IMAGES if images else "npy", 4)
    return found


def write_job(job: Job, folder: Path) -> Path:
    """Write `folder/job.toml` and the files that it reads; its run directory is `folder/run`."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {**_base(job, folder), **job.keys()}
    for table, (kind, rows) in sources_of(job).items():
        keys |= _under(table, _write(job, folder, table.rpartition(".")[2], kind, rows))
    if job.has("validation"):
        keys["eval.sequences"] = job.pick("sequences", (3, 4, 7))
        if job["validation"] == "sets" and job.pick("own sequences", (True, False)):
            keys["eval.sets.held.sequences"] = 2
    kept = {k: v for k, v in keys.items() if v is not None and not job.is_without(k)}
    path = folder / "job.toml"
    path.write_text(to_toml(kept))
    return path


def to_toml(keys: dict[str, Any]) -> str:
    """Dotted keys as tables."""
    tables: dict[str, Any] = {}
    for key, value in keys.items():
        *parents, last = key.split(".")
        table = tables
        for name in parents:
            table = table.setdefault(name, {})
        table[last] = value
    return tomlkit.dumps(tables)


def _under(table: str, keys: dict[str, Any]) -> dict[str, Any]:
    return {f"{table}.{key}": value for key, value in keys.items()}


def _base(job: Job, folder: Path) -> dict[str, Any]:
    """Keys that every job has."""
    sizes = job.sizes
    model = {
        name: sizes[name]
        for name in ("dim", "num_layers", "num_heads", "hidden_dim", "vocab_size", "init_std")
    }
    model["max_seq_len"] = max(sizes["seq_len"], sizes["later_seq_len"])
    if job["mixer"] == "attention":
        if job.has("kv heads"):
            model["num_kv_heads"] = sizes["num_kv_heads"]
        if sizes["dim"] != sizes["num_heads"] * sizes["head_dim"]:
            model["head_dim"] = sizes["head_dim"]
    keys = {
        "run.dir": str(folder / "run"),
        "run.seed": job.pick("run seed", range(1000)),
        **_under("model", model),
        "data.seq_len": sizes["seq_len"],
        "train.steps": sizes["steps"],
        "train.global_batch": sizes["global_batch"],
        "parallel.device": "cpu",
        "parallel.precision": "fp32",
        "eval.every_steps": 0,
        "checkpoint.every_steps": 0,
        "metrics.every_steps": 1,
        "metrics.console": "off",
        "sample.max_new_tokens": 0,
    }
    if sizes["micro_batch"] is not None:
        keys["train.micro_batch"] = sizes["micro_batch"]
    for name in ("init.seed", "data.seed"):
        if job.pick(name, (True, False)):
            keys[name] = job.pick(f"number of {name}", range(1000))
    return keys


# ---- token files


def _write(job: Job, folder: Path, name: str, kind: str, rows: int) -> dict[str, Any]:
    """Write the files of a source; its keys."""
    if kind == IMAGES:
        return write_conversations(job, folder / name, name, rows, _number(f"{job.name} {name}"))
    if kind.startswith("chat"):
        return _write_conversations(job, folder, name, kind, rows)
    documents = token_documents(job, name, kind, rows)
    ids = np.concatenate(documents).astype("<u2")
    if kind == "npy":
        np.save(folder / f"{name}.npy", ids)
        return {"name": "npy", "path": str(folder / f"{name}.npy"), "npy.eos_id": END}
    ids.tofile(folder / f"{name}.bin")
    keys = {"name": kind, "path": str(folder / f"{name}.bin"), "dtype": "uint16"}
    return {**keys, "nanogpt.bos_id": BEGIN} if kind == "nanogpt" else keys


def token_documents(job: Job, name: str, kind: str, rows: int) -> list[np.ndarray]:
    """Documents of a token file, with their begin and end tokens; all together nearly `rows` rows, the last of them
    not full. A raw file of tokens is one document."""
    seq_len, vocab = job.sizes["seq_len"], job.sizes["vocab_size"]
    if job.has("images"):  # the id of images is none of text
        vocab = min(vocab, PLACEHOLDER)
    random = np.random.default_rng(_number(f"{job.name} {name}"))
    total = max(4, rows * seq_len - int(random.integers(1, seq_len)))
    found: list[np.ndarray] = []
    while total:
        longest = int(random.choice([4, seq_len // 2, seq_len, 3 * seq_len]))
        length = total if kind == "tokens" else min(total, int(random.integers(1, longest + 1)))
        # a chain, which a model learns a part of
        steps = random.integers(0, 4, length).cumsum() * 5 + int(random.integers(vocab))
        tokens = FIRST + steps % (vocab - FIRST)
        if job.has("image tokens"):
            tokens = with_discrete_images(job, tokens, random)
        if kind == "npy":
            tokens[-1] = END
        elif kind == "nanogpt":
            tokens[0] = BEGIN
        found.append(tokens)
        total -= length
    return found


def _number(text: str) -> list[int]:
    """A seed of numpy."""
    return list(text.encode())


# ---- conversations


def _write_conversations(job: Job, folder: Path, name: str, kind: str, rows: int) -> dict[str, Any]:
    _write_tokenizer(folder / "tokenizer")
    random = np.random.default_rng(_number(f"{job.name} {name}"))
    later = job.sizes["later_seq_len"] if job["phases"] == "rows" else job.sizes["seq_len"]
    seq_len, long = min(job.sizes["seq_len"], later), kind in ("chat, truncated", "chat, skipped")
    lines, used = [], 0
    while used < rows * seq_len or len(lines) < 4:
        fits = seq_len if len(lines) < 4 or not long else 2 * seq_len
        lines.append(_conversation(random, fits, kind))
        used += sum(len(m["content"].split()) + 2 for m in lines[-1])
    (folder / f"{name}.jsonl").write_text(
        "".join(json.dumps({"messages": line}) + "\n" for line in lines)
    )
    options: dict[str, dict[str, Any]] = {
        "chat, last": {"train_on": "last"},
        "chat, all": {"train_on": "all"},
        "chat, truncated": {"too_long": "truncate"},
        "chat, skipped": {"too_long": "skip"},
    }
    chat = {
        "tokenizer": str(folder / "tokenizer"),
        "cache": str(folder / "cache"),
        **options.get(kind, {}),
    }
    return {"name": "chat", "path": str(folder / f"{name}.jsonl"), **_under("chat", chat)}


def _conversation(random: np.random.Generator, most: int, kind: str) -> list[dict[str, Any]]:
    """Messages of at most `most` tokens, or two of one word."""
    found: list[dict[str, Any]] = []
    left = int(random.integers(6, most + 1)) if most > 6 else 6
    while len(found) < 2 or left >= 6:
        for role in _ROLES:
            words = int(random.integers(1, max(2, left // 2 - 2)))
            content = " ".join(random.choice(_WORDS, words))
            found.append({"role": role, "content": content})
            if kind == "chat, weighted" and role == "assistant":
                found[-1]["weight"] = float(random.choice([0.0, 0.5, 1.0, 3.0]))
            left -= words + 2
    if kind == "chat, weighted" and not any(m.get("weight") for m in found):
        found[-1]["weight"] = 2.0
    return found


def _write_tokenizer(folder: Path) -> None:
    """A word is a token; as a folder of transformers."""
    if folder.exists():
        return
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate((*_SPECIALS, *_WORDS))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in _SPECIALS[:4]])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

"""Bad input by kind: how to make it, the exit code it gets, and the words its sentence must hold.

`prepare` and `call` run in children of a warm process; docs/bad-input.md is written from what they say.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from forge_testing.jobs import write_job

CONFIG, DATA, CORRUPT = 78, 65, 66
Args = list[str | Path]


class Case(NamedTuple):
    """`args(folder)` makes what is wrong and returns the command line."""

    name: str
    args: Callable[[Path], Args]
    code: int
    says: tuple[str, ...]


class Call(NamedTuple):
    """A library call on bad input, which raises ValueError (or a kind of it) with a sentence."""

    name: str
    call: Callable[[Path], object]
    says: tuple[str, ...]


def warm_up() -> None:
    """What a first command line reads, once for all: docstrings of classes, Python's own texts."""
    from forge_data import SourceConfig, open_source
    from forge_train.config.flags import parse_flags

    with contextlib.suppress(
        ImportError
    ):  # only cases of streamed sets and of conversations need them
        importlib.import_module("datasets")
        with tempfile.TemporaryDirectory() as folder:
            conversation("", '{"messages": [{"role": "user", "content": "a"}]}').call(Path(folder))
    parse_flags({"data": {"sources": {"text": {}}}}, [], "warm", "")
    open_source(SourceConfig())


def prepare(name: str, folder: str) -> None:
    """Make the input of a case; its command line is left in `folder/.args`."""
    args = BY_NAME[name].args(Path(folder))  # type: ignore[union-attr]
    (Path(folder) / ".args").write_text(json.dumps([str(arg) for arg in args]))


def call(name: str, folder: str) -> None:
    """Make a library call; its refusal is printed as a command would."""
    try:
        BY_NAME[name].call(Path(folder))  # type: ignore[union-attr]
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(CONFIG)


def flags(*more: str, verb: str = "run") -> Callable[[Path], Args]:
    gpus = ["--gpus", "2"] if verb == "plan" else []
    return lambda folder: [verb, write_job(folder), *more, *gpus]


def toml(extra: str, verb: str = "run") -> Callable[[Path], Args]:
    """A job file with lines replaced or added: `section.key = value`, `key` may be new."""
    gpus = ["--gpus", "2"] if verb == "plan" else []

    def build(folder: Path) -> Args:
        job = write_job(folder)
        (folder / "child.toml").write_text(f'extends = "{job.name}"\n{extra}\n')
        return [verb, folder / "child.toml", *gpus]

    return build


def _line(key: str, value: str) -> str:
    table, _, name = key.rpartition(".")
    return f"[{table}]\n{name} = {value}\n"


def content(text: str | bytes) -> Callable[[Path], Args]:
    """A configuration that consists of this."""

    def build(folder: Path) -> Args:
        path = folder / "odd.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return ["run", path]

    return build


def fifo(folder: Path, name: str = "pipe.toml") -> Path:
    os.mkfifo(folder / name)
    return folder / name


def extends(base: Callable[[Path], object]) -> Callable[[Path], Args]:
    def build(folder: Path) -> Args:
        (folder / "child.toml").write_text(f'extends = "{base(folder)}"')
        return ["run", folder / "child.toml"]

    return build


def chain(folder: Path) -> Args:
    for i in range(20):
        (folder / f"{i}.toml").write_text(f'extends = "{i + 1}.toml"')
    return ["run", folder / "0.toml"]


def circle(folder: Path) -> Args:
    (folder / "a.toml").write_text('extends = "b.toml"')
    (folder / "b.toml").write_text('extends = "a.toml"')
    return ["run", folder / "a.toml"]


def train(folder: Path) -> Path:
    """Two steps of the tiny job, with a checkpoint; trained once for all cases, beside their folders."""
    from forge_train import Trainer, load_job

    original = folder.parent / "trained"
    if not original.exists():
        original.mkdir()
        Trainer(load_job(write_job(original), {"train.steps": 2, "metrics.console": "off"})).fit()
    shutil.copytree(original / "run", folder / "run")
    return write_job(folder)


def recorded(text: bytes) -> Callable[[Path], Args]:
    """A run with checkpoints whose config.toml is this."""

    def build(folder: Path) -> Args:
        job = train(folder)
        (folder / "run/config.toml").write_bytes(text)
        return ["run", job]

    return build


def token_file(folder: Path, ids: int = 4000, **sidecar: object) -> Path:
    """A prepared token directory of `ids` bytes, with fields of its sidecar replaced."""
    from forge_data.prepare import prepare

    text, more = folder / "text.txt", folder / "more.txt"
    text.write_text("some words to read\n" * (ids // 19 + 1))
    more.write_text("a few more")
    out = folder / "tokens"
    prepare([text, more], out)
    meta = next(out.glob("*.json"))
    meta.write_text(json.dumps({**json.loads(meta.read_text()), **sidecar}))
    return out


def data_job(folder: Path, path: Path, *more: str) -> Args:
    job = write_job(folder)
    job.write_text(job.read_text().replace('name = "builtin"', f'name = "tokens"\npath = "{path}"'))
    job.write_text(job.read_text().replace("every_steps = 6", "every_steps = 0"))
    return ["run", job, *more]


def text_job(table: str) -> Callable[[Path], Args]:
    """A run on a text file with more keys in its table."""

    def build(folder: Path) -> Args:
        (folder / "notes.txt").write_text("some words to read\n" * 9)
        args = data_job(folder, folder / "notes.txt")
        job = Path(args[1])
        text = job.read_text().replace('name = "tokens"', f'name = "text"\n{table}')
        job.write_text(text.replace("FOLDER", str(folder)))
        return args

    return build


def file_of(
    kind: str, name: str, content: Callable[[], bytes], table: str = "", *more: str
) -> Callable[[Path], Args]:
    """A source of a kind that is read as it is, from a file (or a folder of one) with this content."""

    def build(folder: Path) -> Args:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content())
        given = path.parent if kind == "huggingface" else path
        args = data_job(folder, given, *more)
        job = Path(args[1])
        own = table or (
            f'{kind}.cache = "{folder / "cache"}"' if kind in ("text", "huggingface") else ""
        )
        new = f'name = "{kind}"\n{own}'
        job.write_text(job.read_text().replace('name = "tokens"', new))
        return args

    return build


def streamed_job(lines: str, table: str = "", more: str = "") -> Callable[[Path], Args]:
    """A run that reads a folder of JSON lines while it trains."""

    def build(folder: Path) -> Args:
        (folder / "set").mkdir()
        if lines:
            (folder / "set" / "train.jsonl").write_text(lines)
        args = data_job(folder, folder / "set")
        job = Path(args[1])
        streaming = f'name = "huggingface"\nhuggingface = {{streaming = true{table}}}'
        job.write_text(job.read_text().replace('name = "tokens"', streaming) + more)
        return args

    return build


def parquet(column: str = "text", values: Sequence[object] = ("some words", "to read")) -> bytes:
    """The bytes of a parquet file of one column."""
    import pyarrow
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({column: list(values)}), sink)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def flipped(content: bytes, at: int | None = None) -> bytes:
    """The content with a byte changed, by default in its middle."""
    at = len(content) // 2 if at is None else at
    return content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :]


def zstd(content: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(content)


def llm_c(magic: int, count: int) -> bytes:
    """A header of llm.c and 8 ids."""
    return struct.pack("<256i", magic, 1, count, *[0] * 253) + struct.pack("<8H", *range(8))


def megatron(
    *more: str, at: int | None = None, value: int = 0, form: str = "Q", cut: int = 0
) -> Callable[[Path], Args]:
    """An indexed set of two sequences of four ids, with a number of its index changed, or tokens cut off."""

    def build(folder: Path) -> Args:
        tokens = struct.pack("<8H", *range(8))
        (folder / "text.bin").write_bytes(tokens[: len(tokens) - cut])
        head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
        index = bytearray(head + struct.pack("<iiqqqqq", 4, 4, 0, 8, 0, 1, 2))
        if at is not None:
            struct.pack_into(f"<{form}", index, at, value)
        return file_of("megatron", "text.idx", lambda: bytes(index), "", *more)(folder)

    return build


def npy(values: Sequence[object], dtype: str = "<u2") -> bytes:
    """The bytes of a .npy file."""
    import io

    import numpy

    sink = io.BytesIO()
    numpy.save(sink, numpy.array(values, dtype), allow_pickle=True)
    return sink.getvalue()


def truncated(folder: Path) -> Args:
    path = token_file(folder)
    tokens = path / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-7])
    return data_job(folder, path)


def sidecar(text: str) -> Callable[[Path], Args]:
    """Token files whose sidecar is this."""

    def build(folder: Path) -> Args:
        path = token_file(folder)
        next(path.glob("*.json")).write_text(text)
        return data_job(folder, path)

    return build


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Args]:
    """Token files, one of them with other bytes."""

    def build(folder: Path) -> Args:
        path = token_file(folder) / name
        path.write_bytes(change(path.read_bytes()))
        return data_job(folder, path.parent)

    return build


def piped(name: str) -> Callable[[Path], Args]:
    """Token files, one of them a pipe."""

    def build(folder: Path) -> Args:
        path = token_file(folder)
        next(path.glob(name)).unlink()
        fifo(path, name.replace("*", "tokens"))
        return data_job(folder, path)

    return build


def raw_without_dtype(folder: Path) -> Args:
    raw = folder / "raw.bin"
    raw.write_bytes(bytes(range(200)) * 20)
    return data_job(folder, raw, "--sample.max_new_tokens", "0")


def vocabulary(folder: Path) -> Args:
    return data_job(folder, token_file(folder), "--model.vocab_size", "64")


def unwritable(folder: Path) -> Args:
    (folder / "file").write_text("in the way")
    return ["run", write_job(folder), "--run.dir", str(folder / "file/run")]


def other_model(folder: Path) -> Args:
    return ["run", train(folder), "--model.dim", "32"]


def damaged_store(folder: Path) -> Args:
    job = train(folder)
    for manifest in (folder / "run/checkpoints").glob("step-*/manifest.json"):
        manifest.write_text("{}")
    return ["run", job]


_HF = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
       "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
       "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": False}  # fmt: skip


def _hf(key: str, value: object, *says: str) -> Call:
    """A config.json of transformers with one key wrong."""

    def read(_: Path) -> object:
        from forge_core.families import LLAMA

        return LLAMA.config_from_hf({**_HF, key: value})

    return Call(f"{key} = {value!r:.20}", read, says or (key,))


def conversation(name: str, line: str, *says: str) -> Call:
    """A file of conversations with this line."""

    def read(folder: Path) -> None:
        from forge_data import SourceConfig, open_source
        from forge_data.kinds import ChatConfig
        from forge_testing.chats import save_tokenizer

        (folder / "talks.jsonl").write_text(line + "\n")
        save_tokenizer(folder / "tokenizer")
        chat = ChatConfig(tokenizer=str(folder / "tokenizer"), cache=str(folder / "cache"))
        open_source(SourceConfig("chat", str(folder / "talks.jsonl"), chat=chat))

    return Call(name, read, says)


def resealed(change: Callable[[dict], object]) -> Callable[[Path], Args]:
    """A run whose newest manifest says something else, under a digest that fits."""

    def build(folder: Path) -> Args:
        job = train(folder)
        for path in (folder / "run/checkpoints").glob("step-*/manifest.json"):
            table = json.loads(path.read_bytes())["manifest"]
            change(table)
            body = json.dumps(table, separators=(",", ":")).encode()
            digest = hashlib.sha256(body).hexdigest().encode()
            path.write_bytes(b'{"sha256": "' + digest + b'", "manifest": ' + body + b"}\n")
        return ["run", job]

    return build


def stored(change: Callable[[Path], object]) -> Callable[[Path], Args]:
    """A run whose checkpoints folder was changed by hand."""

    def build(folder: Path) -> Args:
        job = train(folder)
        change(folder / "run/checkpoints")
        return ["run", job]

    return build


def _newest(checkpoints: Path) -> Path:
    return max(checkpoints.glob("step-*"))


def _sparse(path: Path, size: int) -> None:
    path.write_bytes(b"")
    os.truncate(path, size)


def _replace_by_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def changed_data(folder: Path) -> Args:
    from forge_train import Trainer, load_job

    path = token_file(folder)
    args = data_job(folder, path)
    settings = {"train.steps": 2, "eval.every_steps": 0, "metrics.console": "off"}
    Trainer(load_job(args[1], settings)).fit()
    for file in [folder / "text.txt", *path.iterdir()]:
        file.unlink()
    path.rmdir()
    token_file(folder, ids=5000)
    return args


def _zeros(key: str, number: int) -> Case:
    return Case(f"{key} = {number:.0e}", toml(_line(key, str(number))), CONFIG,
                (key.split(".")[-1], str(number), "zeros"))  # fmt: skip


def _no_number(key: str, value: str) -> Case:
    return Case(f"{key} = {value}", toml(_line(key, value)), CONFIG,
                (f"{key}: {value} must be a finite number",))  # fmt: skip


def _unknown(key: str, value: str, more: str = "") -> list[Case]:
    """All three verbs say the same."""
    return [Case(f"{verb}: {key} = {value}", toml(_line(key, value) + more, verb), CONFIG,
                 (key, value.strip("[]").strip("'"))) for verb in ("run", "explain", "plan")]  # fmt: skip


# fmt: off
CASES: dict[str, list[Case | Call]] = {
    "A key, flag or verb that nobody knows": [
        Case("unknown key", toml("[train]\nstepz = 3"), CONFIG, ("train.stepz", "did you mean train.steps")),
        Case("unknown section", toml("[trian]\nsteps = 3"), CONFIG, ("trian", "did you mean train")),
        Case("unknown flag", flags("--train.stepz", "3"), CONFIG, ("--train.stepz", "--train.steps")),
        Case("unknown verb", lambda f: ["rum", write_job(f)], CONFIG, ("'rum'", "use one of run")),
        Case("50,000 unknown keys", content("".join(f"k{i} = 1\n" for i in range(50_000))), CONFIG,
             ("k0 is not a known key", "more keys are not known")),
        Case("a key of 100,000 characters", content("k" * 100_000 + " = 1"), CONFIG,
             ("kkk", "is not a known key")),
        Case("F108 the same flag twice", flags("--train.steps", "3", "--train.steps", "5"), CONFIG,
             ("--train.steps", "once", "leave one out")),
        Case("the same flag twice, spelt in two ways", flags("--data.seq-len=8", "--data.seq_len=9"), CONFIG,
             ("--data.seq_len", "once")),
        Case("the same flag of a verb twice", flags("--gpus", "4", verb="plan"), CONFIG, ("--gpus", "once")),
    ],
    "A value of the wrong type": [
        Case("float for an int", toml("[model]\nnum_heads = 1.9"), CONFIG,
             ("model.num_heads", "1.9", "must be an integer")),
        Case("float flag for an int", flags("--model.num_heads", "1.9"), CONFIG, ("model.num_heads", "1.9")),
        Case("misspelt bool", toml('[model]\ntie_embeddings = "flase"'), CONFIG,
             ("model.tie_embeddings", "flase", "true or false")),
        Case("misspelt bool flag", flags("--model.tie_embeddings", "flase"), CONFIG,
             ("model.tie_embeddings", "flase", "true")),
        Case("int for a bool", toml("[model]\nqk_norm = 1"), CONFIG, ("model.qk_norm", "true or false")),
        Case("misspelt choice", toml('[parallel]\nprecision = "bf61"'), CONFIG,
             ("parallel.precision", "bf61", "did you mean 'bf16'")),
        Case("a table where a value belongs", toml("[train.steps]\nx = 1"), CONFIG, ("train.steps",)),
        Case("a value where a table belongs", toml("eval = 3"), CONFIG, ("eval", "table")),
        Case("a list where a number belongs", toml("[train]\nsteps = [3]"), CONFIG,
             ("train.steps", "[3]", "must be an integer")),
        Case("a date where a number belongs", toml("[train]\nsteps = 2020-01-01"), CONFIG,
             ("train.steps", "must be an integer")),
    ],
    "A number that is none": [
        *(_no_number(key, value) for value in ("nan", "inf", "-inf") for key in
          ("optimizer.lr", "train.max_grad_norm", "sample.temperature", "model.rope_theta")),
        Case("infinity in a file", toml("[optimizer]\nlr = inf"), CONFIG, ("optimizer.lr: inf must be",)),
        Case("an integer of 5,000 digits", toml("[train]\nsteps = " + "9" * 5000), CONFIG,
             ("child.toml", "thousands of digits")),
        Case("a flag of 5,000 digits", flags("--train.steps", "9" * 5000), CONFIG, ("train.steps",)),
        Case("a hexadecimal integer of 50,000 digits", toml("[train]\nsteps = 0x" + "f" * 50_000), CONFIG,
             ("train.steps", "an integer of 200000 bits", "64 bits")),
        Case("a float beyond all", toml("[optimizer]\nlr = 1e999"), CONFIG, ("optimizer.lr", "finite")),
        Case("text beyond all for a choice", toml('[parallel]\nprecision = "' + "b" * 10_000 + '"'), CONFIG,
             ("parallel.precision", "must be")),
    ],
    "Some zeros too many": [
        _zeros("train.steps", 10**12), _zeros("train.global_batch", 10**9), _zeros("train.tokens", 10**18),
        _zeros("train.micro_batch", 10**9), _zeros("eval.sequences", 10**9),
        _zeros("eval.every_steps", 10**12), _zeros("checkpoint.every_steps", 10**12),
        _zeros("checkpoint.keep_last", 10**12), _zeros("metrics.every_steps", 10**12),
        *(Case(f"{key} = {n:.0e}", toml(_line(key, str(n))), CONFIG, (key.split(".")[-1], str(n))) for key, n in (
            ("model.dim", 10**9), ("model.num_layers", 10**6), ("model.vocab_size", 10**12),
            ("model.hidden_dim", 10**12), ("data.seq_len", 10**12), ("data.num_workers", 100_000))),
        _zeros("sample.max_new_tokens", 10**9),
        Case("train.tokens = 2**70", flags("--train.tokens", str(2**70)), CONFIG, ("train.tokens", "64 bits")),
        Case("train.tokens_per_parameter = 1e300", flags("--train.tokens_per_parameter", "1e300"), CONFIG,
             ("tokens_per_parameter 1e+300", "at most 10**6")),
        Case("run.seed = 2**64", flags("--run.seed", str(2**64)), CONFIG, ("run.seed", "64 bits")),
    ],
    "Settings that do not go together": [
        Case("indivisible heads", flags("--model.num_heads", "3"), CONFIG, ("dim 16", "num_heads 3", "divisible")),
        Case("indivisible batch", flags("--train.micro_batch", "3"), CONFIG,
             ("global_batch 4", "micro_batch 3", "use micro_batch 1, 2, 4")),
        Case("two lengths", toml("[train]\nsteps = 3\ntokens = 100"), CONFIG, ("steps, tokens", "exactly one")),
        Case("warm-up longer than the run", flags("--schedule.warmup_steps", "50"), CONFIG,
             ("warmup_steps", "50", "12")),
        Case("warm-up longer than the run, in a plan", flags("--schedule.warmup_steps", "50", verb="plan"),
             CONFIG, ("warmup_steps", "50", "12")),
        Case("warm-up longer than a run in tokens", flags("--train.tokens", "500", "--schedule.warmup_steps", "4",
             verb="explain"), CONFIG, ("warmup_steps 4", "the 4 steps")),
        Case("warm-up and decay longer than the run", flags("--schedule.name", "wsd", "--schedule.warmup_steps", "6",
             "--schedule.wsd.decay_steps", "7"), CONFIG, ("warmup_steps 6", "7 steps of decay", "12 steps")),
        Case("a key of another schedule", flags("--schedule.wsd.decay", "linear"), CONFIG,
             ("schedule", "wsd.decay linear", "name is 'cosine'")),
        Case("a decay beside an average", flags("--optimizer.name", "schedule_free_adamw"), CONFIG,
             ("schedule.name 'cosine'", "'constant'", "schedule_free_adamw")),
        Case("a warm-up without a schedule", flags("--schedule.name", "none", "--schedule.warmup_steps", "2"), CONFIG,
             ("schedule", "warmup_steps 2", "'none'")),
        Case("a fork of nothing", flags("--init.from", "nowhere"), CONFIG,
             ("init.from 'nowhere'", "name a run", "Hugging Face")),
        Case("a fork that goes on without moments", flags("--init.from", ".", "--init.keep", "weights", "cursor"), CONFIG,
             ("init", "keep ['weights', 'cursor']", "add 'optimizer'")),
        Case("a fork in the folder of its parent", flags("--init.from", "runs/x@3", "--run.dir", "runs/x"), CONFIG,
             ("run.dir 'runs/x'", "a fork needs a folder of its own")),
        Case("patterns of no source", flags("--init.patterns", "layers.*"), CONFIG,
             ("init", "patterns ['layers.*']", "give from")),
        Case("row longer than the model", flags("--model.max_seq_len", "16"), CONFIG,
             ("data.seq_len 32", "model.max_seq_len 16")),
        Case("several problems at once", toml("[train]\nglobal_batch = 0\n[optimizer]\nlr = -1.0"), CONFIG,
             ("global_batch 0", "lr")),
    ],
    "A name that leads nowhere": [
        *_unknown("optimizer.name", "'shampoo'"), *_unknown("schedule.name", "'polynomial'"),
        *_unknown("model.moe.router", "'hashed'", "num_experts = 4"),
        *_unknown("callbacks.mine.name", "'no_lab.hooks:Mine'"),
        *_unknown("model.name", "'no_lab.model:build'"),
        Case("no such optimizer", flags("--optimizer.name", "adamww"), CONFIG, ("adamww", "did you mean 'adamw'")),
        Case("an optimizer that cannot be imported", flags("--optimizer.name", "no_lab:Opt"), CONFIG,
             ("optimizer.name", "no_lab:Opt")),
        Case("no GPU", flags("--parallel.device", "cuda"), CONFIG, ("cuda", "cpu")),
    ],
    "A file that is no configuration": [
        Case("missing config file", lambda f: ["run", f / "nothing.toml"], CONFIG, ("nothing.toml", "No such file")),
        Case("no config file at all", lambda f: ["run"], CONFIG, ("needs a TOML file",)),
        Case("broken TOML", content("[train\nsteps = 3"), CONFIG, ("odd.toml", "not valid TOML", "line 1")),
        Case("bytes", content(bytes(range(256))), CONFIG, ("odd.toml", "is not text", "UTF-8")),
        Case("NUL in a file", content("a = '\0'"), CONFIG, ("odd.toml", "not valid TOML")),
        Case("2 MiB", content("# comment\n" * 210_000), CONFIG, ("odd.toml", "more than 1048576 bytes")),
        Case("lists 20,000 deep", content("a = " + "[" * 20_000), CONFIG, ("odd.toml", "nested", "flat")),
        Case("inline tables 20,000 deep", content("a = " + "{a = " * 20_000), CONFIG, ("odd.toml", "nested")),
        Case("a list 20 deep", content("a = " + "[" * 20 + "]" * 20), CONFIG, ("odd.toml", "nested")),
        Case("a dotted key of 20,000", content("a." * 20_000 + "a = 1"), CONFIG, ("odd.toml", "fewer dots")),
        Case("a table name of 20,000", content("[" + "a." * 20_000 + "a]"), CONFIG, ("odd.toml", "fewer dots")),
        Case("a dotted key of 20,000 quotes", content('"\\"".' * 20_000 + "a = 1"), CONFIG, ("odd.toml", "fewer dots")),
        Case("a folder", lambda f: ["run", f], CONFIG, ("is no regular file",)),
        Case("a pipe", lambda f: ["run", fifo(f)], CONFIG, ("pipe.toml", "is no regular file")),
        Case("a device without end", lambda f: ["run", "/dev/zero"], CONFIG, ("/dev/zero", "is no regular file")),
        Case("circle of extends", circle, CONFIG, ("circular", "a.toml", "b.toml")),
        Case("20 files of extends", chain, CONFIG, ("extends", "more than 16 files")),
        Case("extends a pipe", extends(fifo), CONFIG, ("pipe.toml", "extends of", "is no regular file")),
        Case("extends a number", content("extends = 3"), CONFIG, ("extends 3", "path of one TOML file")),
        Case("extends a path with NUL", content('extends = "a\\u0000b"'), CONFIG, ("is no path",)),
        Case("the run's config.toml is bytes", recorded(b"\xff\xfe"), CONFIG, ("run/config.toml", "is not text")),
        Case("the run's config.toml is torn", recorded(b"[model\n"), CONFIG, ("run/config.toml", "not valid TOML")),
        Case("the run's config.toml is deep", recorded(b"a = " + b"[" * 9000), CONFIG, ("run/config.toml", "nested")),
    ],
    "A path or text that no file system takes": [
        Case("NUL in run.dir", toml('[run]\ndir = "a\\u0000b"'), CONFIG, ("run.dir", "without NUL")),
        Case("bytes in run.dir", flags("--run.dir", "a\udcffb"), CONFIG, ("run.dir", "UTF-8")),
        Case("bytes in a prompt", flags("--sample.prompt", "a\udcff"), CONFIG, ("sample.prompt", "UTF-8")),
        Case("NUL in a data path", toml('[data.sources.text]\nname = "tokens"\npath = "a\\u0000b"'), CONFIG,
             ("data.sources.text.path", "without NUL")),
        Case("a run directory below a file", unwritable, CONFIG, ("file/run", "cannot be written")),
        Case("a name of 5,000 characters", flags("--run.dir", "a" * 5000), CONFIG,
             ("run.dir", "cannot be written", "File name too long")),
    ],
    "Data": [
        Case("missing data path", lambda f: data_job(f, f / "nowhere"), DATA, ("nowhere",)),
        Case("truncated token file", truncated, DATA, ("tokens.bin", "bytes")),
        Case("a key of another kind of source", text_job('huggingface = {split = "test"}'), CONFIG,
             ("data.sources.text", "huggingface.split 'test'", "name is 'text'")),
        Case("a tokenizer of text that is not there", text_job('text = {tokenizer = "FOLDER/none.json"}'), DATA,
             ("data.sources.text", "none.json must be a JSON file")),
        Case("a tokenizer of text that is text", text_job('text = {tokenizer = "FOLDER/notes.txt"}'), DATA,
             ("data.sources.text", "notes.txt must be a JSON file of the tokenizers library")),
        Case("text without a held-out part", lambda f: [*text_job("")(f), "--eval.every_steps", "6"], DATA,
             ("data.validation", "must hold train/ and validation/", "text.validation_every")),
        Case("a streamed set without files", streamed_job(""), DATA, ("set must be a set that datasets can load",)),
        Case("a streamed set without the column", streamed_job('{"story": "a"}\n'), DATA,
             ("train.jsonl must have a column 'text', and has story",)),
        Case("a streamed column of numbers", streamed_job('{"text": 1}\n'), DATA,
             ("train.jsonl column 'text' must hold text, and holds int64",)),
        Case("a streamed row of nothing", streamed_job('{"text": null}\n'), DATA, ("train.jsonl row 0 has no 'text'",)),
        Case("streamed text that is blank", streamed_job('{"text": " "}\n'), DATA, ("every row is empty",)),
        Case("a streamed file that is torn", streamed_job('{"text": "a"}\n{"text": "b'), DATA,
             ("train.jsonl must be readable behind row 0, and is not",)),
        Case("a slice of a streamed set", streamed_job('{"text": "a"}\n', ', split = "train[:9]"'), CONFIG,
             ("huggingface: split 'train[:9]'", "whole split when streaming")),
        Case("longer rows of a streamed set", streamed_job('{"text": "a"}\n', more="[data.phases.long]\nstart_instance = 9\nseq_len = 64\n"),
             CONFIG, ("phases.long.seq_len 64", "streams and cannot begin anew")),
        Case("F41 raw file without dtype", raw_without_dtype, DATA, ("raw.bin", "dtype")),
        Case("F49 vocabulary too small", vocabulary, DATA, ("model.vocab_size 64", "must be below")),
        Case("a sidecar of lists 20,000 deep", sidecar("[" * 20_000), DATA, ("tokens",)),
        Case("a sidecar of bytes", sidecar("\0\1"), DATA, ("tokens",)),
        Case("a sidecar that is a list", sidecar("[]"), DATA, ("tokens",)),
        Case("a sidecar that is a pipe", piped("*.json"), DATA, ("must be a regular file",)),
        Case("a tokenizer {} in a sidecar", lambda f: data_job(f, token_file(f, tokenizer={})), DATA,
             ("tokenizer",)),
        Case("a vocabulary of 10**12 in a sidecar", lambda f: data_job(f, token_file(f, vocab_size=10**12)),
             CONFIG, ("vocab_size", "1000000000000")),
        Case("offsets of documents that fall", rewritten("documents.bin", lambda b: b[::-1]), DATA,
             ("documents.bin",)),
        Case("offsets of documents that are zero", rewritten("documents.bin", lambda b: bytes(len(b))), DATA,
             ("documents.bin",)),
        Case("a flipped bit in the tokens", rewritten("tokens.bin", lambda b: bytes([b[0] ^ 1]) + b[1:]), DATA,
             ("tokens.bin",)),
        conversation("a conversation of pirates", '{"messages": [{"role": "pirate", "content": "a"}]}',
                     "line 1 message 0 has role 'pirate'"),
        conversation("a conversation without messages", '{"messages": []}', "line 1 must have at least one message"),
        conversation("a conversation of pictures", '{"messages": [{"role": "user", "content": [1]}]}',
                     "line 1 message 0 has a list as content"),
        conversation("a conversation that ends in the middle", '{"messages": [{"role": "user"', "line 1 must be JSON"),
        Case("a parquet file without its end", file_of("text", "a.parquet", lambda: parquet()[:-9]), DATA,
             ("data.sources.text", "a.parquet")),
        Case("a parquet file of other columns", file_of("text", "a.parquet", lambda: parquet("words")), DATA,
             ("a.parquet", "text", "words")),
        Case("a parquet file of numbers", file_of("text", "a.parquet", lambda: parquet(values=[1, 2])), DATA,
             ("a.parquet", "text")),
        Case("text of gzip that ends in the middle", file_of("text", "a.txt.gz", lambda: gzip.compress(b"words " * 99)[:-9]),
             DATA, ("a.txt.gz",)),
        Case("text of zstd that is none", file_of("text", "a.txt.zst", lambda: b"words"), DATA, ("a.txt.zst",)),
        Case("a set of datasets without text", file_of("huggingface", "set/a.parquet", lambda: parquet("words")), DATA,
             ("data.sources.text", "text", "words")),
        Case("a streamed set without its end", file_of("huggingface", "set/a.parquet", lambda: parquet()[:-9],
                                                       "huggingface = {streaming = true}"), DATA, ("must be a set that datasets can load",)),
        Case("a streamed set without text", file_of("huggingface", "set/a.parquet", lambda: parquet("words"),
                                                    "huggingface = {streaming = true}"), DATA, ("text", "words")),
        Case("a .npy of objects", file_of("npy", "a.npy", lambda: npy(["a", None], "O")), DATA, ("a.npy",)),
        Case("a .npy of floats", file_of("npy", "a.npy", lambda: npy([1.5], "<f4")), DATA, ("a.npy",)),
        Case("a .npy cut in its header", file_of("npy", "a.npy", lambda: npy([1, 2])[:40]), DATA, ("a.npy",)),
        Case("an index of Megatron without magic", file_of("megatron", "a.idx", lambda: bytes(40)), DATA, ("a",)),
        Case("an odd number of bytes for nanoGPT", file_of("nanogpt", "a.bin", lambda: bytes(7)), DATA, ("a.bin",)),
        Case("F49 ids of nanoGPT over the vocabulary", file_of("nanogpt", "a.bin", lambda: b"\xff\xff" * 400, "",
                                                               "--model.vocab_size", "300"), DATA, ("65535",)),
        Case("text of gzip with a flipped byte", file_of("text", "a.txt.gz", lambda: flipped(gzip.compress(b"words " * 99))), DATA,
             ("a.txt.gz",)),
        Case("text of zstd that ends in the middle", file_of("text", "a.txt.zst", lambda: zstd(b"words " * 99)[:-9]), DATA,
             ("a.txt.zst", "truncated")),
        Case("a parquet file with a flipped byte", file_of("text", "a.parquet", lambda: flipped(parquet(), 20)), DATA,
             ("a.parquet", "cannot be read in row group 0")),
        Case("a parquet file with a null", file_of("text", "a.parquet", lambda: parquet(values=["a", None])), DATA,
             ("a.parquet row 1 has null",)),
        Case("text that is UTF-16", file_of("text", "a.txt", lambda: "words".encode("utf-16")), DATA, ("a.txt must be UTF-8",)),
        Case("JSON that is one list", file_of("text", "a.json", lambda: b'[{"text": "words"}]'), DATA,
             ("a.json line 1 is a list", "one object a line")),
        Case("an index of Megatron with a pointer outside", megatron(at=50, value=2**62), DATA, ("text.idx", "sequence 1 begins at byte")),
        Case("an index of Megatron of floats", megatron(at=17, value=6, form="B"), DATA, ("text.idx", "type of integers")),
        Case("an index of Megatron with a huge count", megatron(at=18, value=2**62), DATA, ("text.idx",)),
        Case("tokens of Megatron that end early", megatron(cut=2), DATA, ("text.bin has 14 bytes", "truncated")),
        Case("F49 ids of Megatron over the vocabulary", megatron("--model.vocab_size", "5"), DATA, ("token id 7", "below")),
        Case("a shard of llm.c that ends early", file_of("nanogpt", "a.bin", lambda: llm_c(20240520, 9)), DATA,
             ("a.bin", "its header says 9 ids", "truncated")),
        Case("a shard of llm.c of another magic", file_of("nanogpt", "a.bin", lambda: llm_c(20240521, 8)), DATA,
             ("a.bin", "magic 20240521")),
        Case("ids of nanoGPT without their end", file_of("nanogpt", "a.bin", lambda: bytes(800), "nanogpt = {eos_id = 9}",
             "--model.vocab_size", "300", "--sample.max_new_tokens", "0"), DATA, ("a.bin", "eos_id 9", "no token is")),
        Case("ids of nanoGPT without a vocabulary", file_of("nanogpt", "a.bin", lambda: bytes(800)), CONFIG,
             ("model.vocab_size must be given", "data.sources.text")),
        Case("a .npy of negative ids", file_of("npy", "a.npy", lambda: npy([3, -7], "<i4"), "", "--model.vocab_size", "300"), DATA,
             ("a.npy holds id -7",)),
        Case("F49 ids of a .npy over the vocabulary", file_of("npy", "a.npy", lambda: npy([3, 900]), "", "--model.vocab_size", "300"),
             DATA, ("token id 900",)),
        Case("data changed under a run", changed_data, DATA, ("other data", "source.num_tokens: checkpoint")),
    ],
    "A config.json of transformers": [
        *(_hf("hidden_size", value) for value in ("32", None, 2.5, float("nan"), float("inf"), True, [32],
                                                  {}, 0, -1, 10**400)),
        _hf("hidden_size", 10**12, "dim 1000000000000", "at most"),
        _hf("num_attention_heads", 0), _hf("num_attention_heads", 3, "num_heads 3"),
        _hf("num_key_value_heads", 3, "num_kv_heads 3"),
        _hf("num_hidden_layers", 10**7, "num_layers 10000000", "at most"), _hf("vocab_size", "x"), _hf("rms_norm_eps", float("nan")),
        _hf("rms_norm_eps", "small"), _hf("rope_theta", float("inf")), _hf("rope_theta", []),
        _hf("rope_scaling", {"rope_type": "linear", "factor": float("nan")}), _hf("rope_scaling", "linear"),
        _hf("hidden_act", "relu6"), _hf("hidden_act", None), _hf("tie_word_embeddings", "yes"),
        _hf("sliding_window", 128), _hf("embedding_multiplier", 12.0), _hf("no_rope_layers", [1, 0]),
        _hf("model_type", "granite"), _hf("attention_bias", 2),
    ],
    "Checkpoints and runs": [
        Case("checkpoint of another model", other_model, CONFIG, ("model.dim was 16", "32")),
        Case("no checkpoint verifies", damaged_store, CORRUPT, ("step-", "manifest")),
        Case("a checkpoint of a newer format", resealed(lambda t: t.update(format=3)), CONFIG,
             ("format 3", "use the version that wrote it")),
        Case("a manifest of 2**30 zeros", stored(lambda c: _sparse(_newest(c) / "manifest.json", 2**30)), CORRUPT,
             ("manifest.json", "does not match its own digest")),
        Case("a manifest that is a pipe", stored(lambda c: _replace_by_pipe(_newest(c) / "manifest.json")),
             CORRUPT, ("manifest.json",)),
        Case("a progress that no run has", resealed(lambda t: t["objects"]["progress"]["value"].update(
             step=10**9)), CORRUPT, ("step",)),
        Case("a progress that is a list", resealed(lambda t: t["objects"]["progress"].update(value=[1])),
             CORRUPT, ("progress",)),
        Case("an object 900 deep", resealed(lambda t: t["objects"]["progress"].update(
             value=json.loads("[" * 900 + "]" * 900))), CORRUPT, ("progress",)),
        Case("an object of an unknown kind", resealed(lambda t: t["objects"]["progress"].update(
             value={"$": "eval", "v": "1"})), CORRUPT, ("progress",)),
        Case("a shape of 10**6 dimensions", resealed(lambda t: next(iter(t["tensors"].values())).update(
             shape=[1] * 10**6)), CORRUPT, ("impossible entry",)),
        Case("a file of 10**15 bytes", resealed(lambda t: next(iter(t["files"].values())).update(
             bytes=10**15)), CORRUPT, ("bytes",)),
        Case("checkpoints is a file", stored(lambda c: (shutil.rmtree(c), c.write_text(""))), CONFIG,
             ("checkpoints",)),
        Case("the lock is a pipe", stored(lambda c: _replace_by_pipe(c / "lock")), CONFIG, ("lock",)),
        Case("the lock is a folder", stored(lambda c: ((c / "lock").unlink(missing_ok=True), (c / "lock").mkdir())),
             CONFIG, ("lock",)),
        Case("generate from nothing", lambda f: ["generate", f / "nothing"], CONFIG, ("nothing", "folder of a run")),
        Case("explain nothing", lambda f: ["explain", f / "nothing"], CONFIG, ("nothing", "No such file")),
    ],
}
# fmt: on
BY_NAME: dict[str, Case | Call] = {case.name: case for cases in CASES.values() for case in cases}
assert len(BY_NAME) == sum(map(len, CASES.values())), "two cases of one name"

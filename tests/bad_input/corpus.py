"""Bad input by kind, and how to make it.

`prepare`, `command` and `call` run in children of a warm process. What comes of each input is in docs/data/bad-input.json.
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

Args = list[str | Path]


class Case(NamedTuple):
    """`args(folder)` makes what is wrong and returns the command line."""

    name: str
    args: Callable[[Path], Args]


class Call(NamedTuple):
    """A library call on bad input, which raises ValueError, or a kind of it."""

    name: str
    call: Callable[[Path], object]


def warm_up() -> None:
    """What a first command line reads, once for all: docstrings of classes, Python's own texts."""
    from forge_data import SourceConfig, open_source
    from forge_train.config.structure import structure

    with contextlib.suppress(
        ImportError
    ):  # only cases of streamed sets and of conversations need them
        importlib.import_module("datasets")
        with tempfile.TemporaryDirectory() as folder:
            conversation("", '{"messages": [{"role": "user", "content": "a"}]}').call(Path(folder))
    structure({"data": {"sources": {"text": {}}}})
    open_source(SourceConfig())


def prepare(name: str, folder: str) -> None:
    """Make the input of a case; its command line is left in `folder/.args`."""
    args = BY_NAME[name].args(Path(folder))  # type: ignore[union-attr]
    (Path(folder) / ".args").write_text(json.dumps([str(arg) for arg in args]))


def call(name: str, folder: str) -> None:
    """Make a library call; its error is printed as a command would."""
    try:
        BY_NAME[name].call(Path(folder))  # type: ignore[union-attr]
    except ValueError as error:
        _leave(error, folder)
        print(error, file=sys.stderr)
        sys.exit(78)


def command(args: list[str], folder: str) -> None:
    """`forge-train ARGS`; the problems of its error are left in `folder/.problems`."""
    from forge_train import cli
    from forge_train.errors import JobError

    run_verb = cli.run_verb

    def run(args: list[str]) -> int:
        try:
            return run_verb(args)
        except JobError as error:
            _leave(error, folder)
            raise

    cli.run_verb = run
    cli.main(args)


def _leave(error: BaseException, folder: str) -> None:
    rows = [(p.key[:80], p.code) for p in getattr(error, "problems", ())]
    (Path(folder) / ".problems").write_text(json.dumps(rows[:3]))


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


def _hf(key: str, value: object) -> Call:
    """A config.json of transformers with one key wrong."""

    def read(_: Path) -> object:
        from forge_core.families import LLAMA

        return LLAMA.config_from_hf({**_HF, key: value})

    return Call(f"{key} = {value!r:.20}", read)


def conversation(name: str, line: str) -> Call:
    """A file of conversations with this line."""

    def read(folder: Path) -> None:
        from forge_data import SourceConfig, open_source
        from forge_data.kinds import ChatConfig
        from forge_testing.chats import save_tokenizer

        (folder / "talks.jsonl").write_text(line + "\n")
        save_tokenizer(folder / "tokenizer")
        chat = ChatConfig(tokenizer=str(folder / "tokenizer"), cache=str(folder / "cache"))
        open_source(SourceConfig("chat", str(folder / "talks.jsonl"), chat=chat))

    return Call(name, read)


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
    return Case(f"{key} = {number:.0e}", toml(_line(key, str(number))))  # fmt: skip


def _no_number(key: str, value: str) -> Case:
    return Case(f"{key} = {value}", toml(_line(key, value)))  # fmt: skip


def _unknown(key: str, value: str, more: str = "") -> list[Case]:
    """All three verbs say the same."""
    return [Case(f"{verb}: {key} = {value}", toml(_line(key, value) + more, verb)) for verb in ("run", "explain", "plan")]  # fmt: skip


# fmt: off
CASES: dict[str, list[Case | Call]] = {
    "An unknown key, flag or verb": [
        Case("unknown key", toml("[train]\nstepz = 3")),
        Case("unknown section", toml("[trian]\nsteps = 3")),
        Case("unknown flag", flags("--train.stepz", "3")),
        Case("unknown verb", lambda f: ["rum", write_job(f)]),
        Case("50,000 unknown keys", content("".join(f"k{i} = 1\n" for i in range(50_000)))),
        Case("a key of 100,000 characters", content("k" * 100_000 + " = 1")),  # prose: the name of a case
        Case("F108 the same flag twice", flags("--train.steps", "3", "--train.steps", "5")),
        Case("the same flag twice, spelt in two ways", flags("--data.seq-len=8", "--data.seq_len=9")),
        Case("the same flag of a verb twice", flags("--gpus", "4", verb="plan")),
    ],
    "A value of the wrong type": [  # prose: the name of a kind
        Case("float for an int", toml("[model]\nnum_heads = 1.9")),
        Case("float flag for an int", flags("--model.num_heads", "1.9")),
        Case("misspelt bool", toml('[model]\ntie_embeddings = "flase"')),
        Case("misspelt bool flag", flags("--model.tie_embeddings", "flase")),
        Case("int for a bool", toml("[model]\nqk_norm = 1")),
        Case("misspelt choice", toml('[parallel]\nprecision = "bf61"')),
        Case("a table where a value belongs", toml("[train.steps]\nx = 1")),
        Case("a value where a table belongs", toml("eval = 3")),
        Case("a list where a number belongs", toml("[train]\nsteps = [3]")),
        Case("a date where a number belongs", toml("[train]\nsteps = 2020-01-01")),
    ],
    "A value that is not a number": [  # prose: the name of a kind
        *(_no_number(key, value) for value in ("nan", "inf", "-inf") for key in
          ("optimizer.lr", "train.max_grad_norm", "sample.temperature", "model.rope_theta")),
        Case("infinity in a file", toml("[optimizer]\nlr = inf")),  # prose: the name of a case
        Case("an integer of 5,000 digits", toml("[train]\nsteps = " + "9" * 5000)),  # prose: the name of a case
        Case("a flag of 5,000 digits", flags("--train.steps", "9" * 5000)),  # prose: the name of a case
        Case("a hexadecimal integer of 50,000 digits", toml("[train]\nsteps = 0x" + "f" * 50_000)),
        Case("a float beyond all", toml("[optimizer]\nlr = 1e999")),
        Case("text beyond all for a choice", toml('[parallel]\nprecision = "' + "b" * 10_000 + '"')),
    ],
    "Some zeros too many": [
        _zeros("train.steps", 10**12), _zeros("train.global_batch", 10**9), _zeros("train.tokens", 10**18),
        _zeros("train.micro_batch", 10**9), _zeros("eval.sequences", 10**9),
        _zeros("eval.every_steps", 10**12), _zeros("checkpoint.every_steps", 10**12),
        _zeros("checkpoint.keep_last", 10**12), _zeros("metrics.every_steps", 10**12),
        *(Case(f"{key} = {n:.0e}", toml(_line(key, str(n)))) for key, n in (
            ("model.dim", 10**9), ("model.num_layers", 10**6), ("model.vocab_size", 10**12),
            ("model.hidden_dim", 10**12), ("data.seq_len", 10**12), ("data.num_workers", 100_000))),
        _zeros("sample.max_new_tokens", 10**9),
        Case("train.tokens = 2**70", flags("--train.tokens", str(2**70))),
        Case("train.tokens_per_parameter = 1e300", flags("--train.tokens_per_parameter", "1e300")),
        Case("run.seed = 2**64", flags("--run.seed", str(2**64))),
    ],
    "Settings that do not go together": [  # prose: the name of a kind
        Case("indivisible heads", flags("--model.num_heads", "3")),
        Case("indivisible batch", flags("--train.micro_batch", "3")),
        Case("two lengths", toml("[train]\nsteps = 3\ntokens = 100")),
        Case("warm-up longer than the run", flags("--schedule.warmup_steps", "50")),  # prose: the name of a case
        Case("warm-up longer than the run, in a plan", flags("--schedule.warmup_steps", "50", verb="plan")),
        Case("warm-up longer than a run in tokens", flags("--train.tokens", "500", "--schedule.warmup_steps", "4",
             verb="explain")),
        Case("warm-up and decay longer than the run", flags("--schedule.name", "wsd", "--schedule.warmup_steps", "6",
             "--schedule.wsd.decay_steps", "7")),
        Case("a key of another schedule", flags("--schedule.wsd.decay", "linear")),  # prose: the name of a case
        Case("a warm-up without a schedule", flags("--schedule.name", "none", "--schedule.warmup_steps", "2")),
        Case("a fork of nothing", flags("--init.from", "nowhere")),  # prose: the name of a case
        Case("a fork that goes on without moments", flags("--init.from", ".", "--init.keep", "weights", "cursor")),
        Case("a fork in the folder of its parent", flags("--init.from", "runs/x@3", "--run.dir", "runs/x")),  # prose: the name of a case
        Case("patterns of no source", flags("--init.patterns", "layers.*")),
        Case("row longer than the model", flags("--model.max_seq_len", "16")),  # prose: the name of a case
        Case("several problems at once", toml("[train]\nglobal_batch = 0\n[optimizer]\nlr = -1.0")),
    ],
    "A name that leads nowhere": [  # prose: the name of a kind
        *_unknown("optimizer.name", "'shampoo'"), *_unknown("schedule.name", "'polynomial'"),
        *_unknown("model.moe.router", "'hashed'", "num_experts = 4"),
        *_unknown("callbacks.mine.name", "'no_lab.hooks:Mine'"),
        *_unknown("model.name", "'no_lab.model:build'"),
        Case("no such optimizer", flags("--optimizer.name", "adamww")),
        Case("an optimizer that cannot be imported", flags("--optimizer.name", "no_lab:Opt")),  # prose: the name of a case
        Case("no GPU", flags("--parallel.device", "cuda")),
    ],
    "A file that is no configuration": [  # prose: the name of a kind
        Case("missing config file", lambda f: ["run", f / "nothing.toml"]),
        Case("no config file at all", lambda f: ["run"]),
        Case("broken TOML", content("[train\nsteps = 3")),
        Case("bytes", content(bytes(range(256)))),
        Case("NUL in a file", content("a = '\0'")),  # prose: the name of a case
        Case("2 MiB", content("# comment\n" * 210_000)),
        Case("lists 20,000 deep", content("a = " + "[" * 20_000)),
        Case("inline tables 20,000 deep", content("a = " + "{a = " * 20_000)),
        Case("a list 20 deep", content("a = " + "[" * 20 + "]" * 20)),
        Case("a dotted key of 20,000", content("a." * 20_000 + "a = 1")),
        Case("a table name of 20,000", content("[" + "a." * 20_000 + "a]")),
        Case("a dotted key of 20,000 quotes", content('"\\"".' * 20_000 + "a = 1")),
        Case("a folder", lambda f: ["run", f]),
        Case("a pipe", lambda f: ["run", fifo(f)]),
        Case("a device without end", lambda f: ["run", "/dev/zero"]),
        Case("circle of extends", circle),
        Case("20 files of extends", chain),
        Case("extends a pipe", extends(fifo)),
        Case("extends a number", content("extends = 3")),
        Case("extends a path with NUL", content('extends = "a\\u0000b"')),
        Case("the run's config.toml is bytes", recorded(b"\xff\xfe")),
        Case("the run's config.toml is torn", recorded(b"[model\n")),
        Case("the run's config.toml is deep", recorded(b"a = " + b"[" * 9000)),
    ],
    "A path or text that no file system takes": [
        Case("NUL in run.dir", toml('[run]\ndir = "a\\u0000b"')),
        Case("bytes in run.dir", flags("--run.dir", "a\udcffb")),
        Case("bytes in a prompt", flags("--sample.prompt", "a\udcff")),
        Case("NUL in a data path", toml('[data.sources.text]\nname = "tokens"\npath = "a\\u0000b"')),  # prose: the name of a case
        Case("a run directory below a file", unwritable),
        Case("a name of 5,000 characters", flags("--run.dir", "a" * 5000)),  # prose: the name of a case
    ],
    "Data": [
        Case("missing data path", lambda f: data_job(f, f / "nowhere")),
        Case("truncated token file", truncated),
        Case("a key of another kind of source", text_job('huggingface = {split = "test"}')),
        Case("a tokenizer of text that is not there", text_job('text = {tokenizer = "FOLDER/none.json"}')),  # prose: the name of a case
        Case("a tokenizer of text that is text", text_job('text = {tokenizer = "FOLDER/notes.txt"}')),  # prose: the name of a case
        Case("text without a held-out part", lambda f: [*text_job("")(f), "--eval.every_steps", "6"]),
        Case("a streamed set without files", streamed_job("")),
        Case("a streamed set without the column", streamed_job('{"story": "a"}\n')),
        Case("a streamed column of numbers", streamed_job('{"text": 1}\n')),
        Case("a streamed row of nothing", streamed_job('{"text": null}\n')),
        Case("streamed text that is blank", streamed_job('{"text": " "}\n')),  # prose: the name of a case
        Case("a streamed file that is torn", streamed_job('{"text": "a"}\n{"text": "b')),
        Case("a slice of a streamed set", streamed_job('{"text": "a"}\n', ', split = "train[:9]"')),  # prose: the name of a case
        Case("longer rows of a streamed set", streamed_job('{"text": "a"}\n', more="[data.phases.long]\nstart_instance = 9\nseq_len = 64\n")),  # prose: the name of a case
        Case("F41 raw file without dtype", raw_without_dtype),
        Case("F49 vocabulary too small", vocabulary),
        Case("a sidecar of lists 20,000 deep", sidecar("[" * 20_000)),
        Case("a sidecar of bytes", sidecar("\0\1")),
        Case("a sidecar that is a list", sidecar("[]")),
        Case("a sidecar that is a pipe", piped("*.json")),
        Case("a tokenizer {} in a sidecar", lambda f: data_job(f, token_file(f, tokenizer={}))),
        Case("a vocabulary of 10**12 in a sidecar", lambda f: data_job(f, token_file(f, vocab_size=10**12))),
        Case("offsets of documents that fall", rewritten("documents.bin", lambda b: b[::-1])),  # prose: the name of a case
        Case("offsets of documents that are zero", rewritten("documents.bin", lambda b: bytes(len(b)))),  # prose: the name of a case
        Case("a flipped bit in the tokens", rewritten("tokens.bin", lambda b: bytes([b[0] ^ 1]) + b[1:])),
        conversation("a conversation of pirates", '{"messages": [{"role": "pirate", "content": "a"}]}'),  # prose: the name of a case
        conversation("a conversation without messages", '{"messages": []}'),
        conversation("a conversation of pictures", '{"messages": [{"role": "user", "content": [1]}]}'),  # prose: the name of a case
        conversation("a conversation that ends in the middle", '{"messages": [{"role": "user"'),  # prose: the name of a case
        Case("a parquet file without its end", file_of("text", "a.parquet", lambda: parquet()[:-9])),  # prose: the name of a case
        Case("a parquet file of other columns", file_of("text", "a.parquet", lambda: parquet("words"))),  # prose: the name of a case
        Case("a parquet file of numbers", file_of("text", "a.parquet", lambda: parquet(values=[1, 2]))),  # prose: the name of a case
        Case("text of gzip that ends in the middle", file_of("text", "a.txt.gz", lambda: gzip.compress(b"words " * 99)[:-9])),  # prose: the name of a case
        Case("text of zstd that is not zstd", file_of("text", "a.txt.zst", lambda: b"words")),
        Case("a set of datasets without text", file_of("huggingface", "set/a.parquet", lambda: parquet("words"))),  # prose: the name of a case
        Case("a streamed set without its end", file_of("huggingface", "set/a.parquet", lambda: parquet()[:-9],
                                                       "huggingface = {streaming = true}")),
        Case("a streamed set without text", file_of("huggingface", "set/a.parquet", lambda: parquet("words"),
                                                    "huggingface = {streaming = true}")),
        Case("a .npy of objects", file_of("npy", "a.npy", lambda: npy(["a", None], "O"))),
        Case("a .npy of floats", file_of("npy", "a.npy", lambda: npy([1.5], "<f4"))),
        Case("a .npy cut in its header", file_of("npy", "a.npy", lambda: npy([1, 2])[:40])),
        Case("an index of Megatron without magic", file_of("megatron", "a.idx", lambda: bytes(40))),
        Case("an odd number of bytes for nanoGPT", file_of("nanogpt", "a.bin", lambda: bytes(7))),
        Case("F49 ids of nanoGPT over the vocabulary", file_of("nanogpt", "a.bin", lambda: b"\xff\xff" * 400, "",
                                                               "--model.vocab_size", "300")),
        Case("text of gzip with a flipped byte", file_of("text", "a.txt.gz", lambda: flipped(gzip.compress(b"words " * 99)))),
        Case("text of zstd that ends in the middle", file_of("text", "a.txt.zst", lambda: zstd(b"words " * 99)[:-9])),  # prose: the name of a case
        Case("a parquet file with a flipped byte", file_of("text", "a.parquet", lambda: flipped(parquet(), 20))),  # prose: the name of a case
        Case("a parquet file with a null", file_of("text", "a.parquet", lambda: parquet(values=["a", None]))),  # prose: the name of a case
        Case("text that is UTF-16", file_of("text", "a.txt", lambda: "words".encode("utf-16"))),  # prose: the name of a case
        Case("JSON that is one list", file_of("text", "a.json", lambda: b'[{"text": "words"}]')),
        Case("an index of Megatron with a pointer outside", megatron(at=50, value=2**62)),
        Case("an index of Megatron of floats", megatron(at=17, value=6, form="B")),
        Case("an index of Megatron with a huge count", megatron(at=18, value=2**62)),
        Case("tokens of Megatron that end early", megatron(cut=2)),
        Case("F49 ids of Megatron over the vocabulary", megatron("--model.vocab_size", "5")),
        Case("a shard of llm.c that ends early", file_of("nanogpt", "a.bin", lambda: llm_c(20240520, 9))),
        Case("a shard of llm.c of another magic", file_of("nanogpt", "a.bin", lambda: llm_c(20240521, 8))),
        Case("ids of nanoGPT without their end", file_of("nanogpt", "a.bin", lambda: bytes(800), "nanogpt = {eos_id = 9}",
             "--model.vocab_size", "300", "--sample.max_new_tokens", "0")),
        Case("ids of nanoGPT without a vocabulary", file_of("nanogpt", "a.bin", lambda: bytes(800))),
        Case("a .npy of negative ids", file_of("npy", "a.npy", lambda: npy([3, -7], "<i4"), "", "--model.vocab_size", "300")),
        Case("F49 ids of a .npy over the vocabulary", file_of("npy", "a.npy", lambda: npy([3, 900]), "", "--model.vocab_size", "300")),  # prose: the name of a case
        Case("data changed under a run", changed_data),
    ],
    "A config.json of transformers": [
        *(_hf("hidden_size", value) for value in ("32", None, 2.5, float("nan"), float("inf"), True, [32],
                                                  {}, 0, -1, 10**400)),
        _hf("hidden_size", 10**12),
        _hf("num_attention_heads", 0), _hf("num_attention_heads", 3),
        _hf("num_key_value_heads", 3),
        _hf("num_hidden_layers", 10**7), _hf("vocab_size", "x"), _hf("rms_norm_eps", float("nan")),
        _hf("rms_norm_eps", "small"), _hf("rope_theta", float("inf")), _hf("rope_theta", []),
        _hf("rope_scaling", {"rope_type": "linear", "factor": float("nan")}), _hf("rope_scaling", "linear"),
        _hf("hidden_act", "relu6"), _hf("hidden_act", None), _hf("tie_word_embeddings", "yes"),
        _hf("sliding_window", 128), _hf("embedding_multiplier", 12.0), _hf("no_rope_layers", [1, 0]),
        _hf("model_type", "granite"), _hf("attention_bias", 2),
    ],
    "Checkpoints and runs": [
        Case("checkpoint of another model", other_model),  # prose: the name of a case
        Case("no checkpoint verifies", damaged_store),
        Case("a checkpoint of a newer format", resealed(lambda t: t.update(format=3))),  # prose: the name of a case
        Case("a manifest of 2**30 zeros", stored(lambda c: _sparse(_newest(c) / "manifest.json", 2**30))),
        Case("a manifest that is a pipe", stored(lambda c: _replace_by_pipe(_newest(c) / "manifest.json"))),
        Case("a progress that no run has", resealed(lambda t: t["objects"]["progress"]["value"].update(  # prose: the name of a case
             step=10**9))),
        Case("a progress that is a list", resealed(lambda t: t["objects"]["progress"].update(value=[1]))),
        Case("an object 900 deep", resealed(lambda t: t["objects"]["progress"].update(
             value=json.loads("[" * 900 + "]" * 900)))),
        Case("an object of an unknown kind", resealed(lambda t: t["objects"]["progress"].update(
             value={"$": "eval", "v": "1"}))),
        Case("a shape of 10**6 dimensions", resealed(lambda t: next(iter(t["tensors"].values())).update(
             shape=[1] * 10**6))),
        Case("a file of 10**15 bytes", resealed(lambda t: next(iter(t["files"].values())).update(  # prose: the name of a case
             bytes=10**15))),
        Case("checkpoints is a file", stored(lambda c: (shutil.rmtree(c), c.write_text("")))),  # prose: the name of a case
        Case("the lock is a pipe", stored(lambda c: _replace_by_pipe(c / "lock"))),
        Case("the lock is a folder", stored(lambda c: ((c / "lock").unlink(missing_ok=True), (c / "lock").mkdir()))),  # prose: the name of a case
        Case("generate from nothing", lambda f: ["generate", f / "nothing"]),
        Case("explain nothing", lambda f: ["explain", f / "nothing"]),
    ],
}
# fmt: on
BY_NAME: dict[str, Case | Call] = {case.name: case for cases in CASES.values() for case in cases}
assert len(BY_NAME) == sum(map(len, CASES.values())), "two cases of one name"

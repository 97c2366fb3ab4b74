"""The tokenizer folder of an export, against transformers: it writes conversations as training did, and ends them so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_core.generate import _decoded
from forge_data import SourceConfig
from forge_data.describe import ends_of_documents
from forge_data.kinds import ChatConfig, TextConfig
from forge_testing.chats import CHATML, HEADERS, dialog, save_tokenizer, write_dialogs
from forge_testing.problems import rejects
from forge_train import ConfigError
from forge_train.build.data import run_tokenizer
from forge_train.build.run_directory import RunDirectory
from forge_train.config.init import InitConfig
from forge_train.config.model import BuiltInModelConfig, LoRASection
from forge_train.hf.exporting import _config_and_files, _Run, _tokenizing
from forge_vlm.data import Prompts

Image = pytest.importorskip("PIL.Image")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.lane("test")

#: CHATML of messages of parts.
PARTS = CHATML.replace("m.content +", "parts(m) +")
PARTS = (
    "{% macro parts(m) %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text if p.type == 'text' else '<|stop|>' }}{% endfor %}{% endif %}{% endmacro %}" + PARTS
)
TALK = dialog("the sky?", "blue", "the grass?", "green")
GENERATION, CONFIG = "generation_config.json", "config.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of tokenizers with the same ids: tuned, base, which has no template and another end, and its tuned sibling."""
    root = tmp_path_factory.mktemp("tokenizers")
    save_tokenizer(root / "tuned")
    save_tokenizer(root / "base", None, eos_token="<|end|>", pad_token=None)
    save_tokenizer(root / "sibling", bos_token="<|head|>", pad_token="<|stop|>")
    save_tokenizer(root / "parts", PARTS)
    (root / "headers.jinja").write_text(HEADERS)
    write_dialogs(root / "talks.jsonl")
    for name in ("tuned", "base"):
        end = transformers.AutoTokenizer.from_pretrained(root / name).eos_token_id
        table = {"model_type": "llama", "eos_token_id": end}
        (root / name / CONFIG).write_text(json.dumps(table))
        (root / name / GENERATION).write_text(json.dumps({"eos_token_id": end, "top_k": 5}))
    return root


def run_of(folder: Path, begin: Path | None) -> RunDirectory:
    """A run that began from a folder, without weights."""
    (folder / "run").mkdir()
    (folder / "run/config.toml").touch()
    if begin is not None:
        shutil.copytree(begin, folder / "run/hf")
    return RunDirectory(folder / "run")


def chat(made: Path, name: str, template: bool = False) -> SourceConfig:
    own = str(made / "headers.jinja") if template else None
    config = ChatConfig(tokenizer=str(made / name), template=own)
    return SourceConfig("chat", str(made / "talks.jsonl"), chat=config)


def write(folder: Path, run: RunDirectory, chosen: str | None = None, **sources: SourceConfig) -> tuple[Path, str | None]:  # fmt: skip
    data: Any = SimpleNamespace(sources=sources)
    given = _Run(run, BuiltInModelConfig(vocab_size=8), data, LoRASection())
    hf, files, remark = _config_and_files(given, "llama", {"model_type": "llama"}, chosen)
    (folder / "out").mkdir()
    for name, content in {**files, CONFIG: json.dumps(hf).encode()}.items():
        (folder / "out" / name).write_bytes(content)
    return folder / "out", remark


@pytest.mark.parametrize(
    ("begin", "name", "template"),
    [
        ("tuned", "tuned", False),
        ("tuned", "tuned", True),
        ("base", "base", True),
        ("base", "sibling", False),
        (None, "sibling", False),
        (None, "base", True),
    ],
)
def test_F200_an_export_writes_and_ends_conversations_as_training_did(
    tmp_path: Path, made: Path, begin: str | None, name: str, template: bool
) -> None:
    run = run_of(tmp_path, None if begin is None else made / begin)
    source = chat(made, name, template)
    out, remark = write(tmp_path, run, talks=source)
    trained = transformers.AutoTokenizer.from_pretrained(made / name)
    found = transformers.AutoTokenizer.from_pretrained(out)
    wanted = HEADERS if template else CHATML
    assert found.chat_template == wanted
    assert (
        json.loads((out / "tokenizer_config.json").read_text()).get("chat_template", wanted)
        == wanted
    )
    assert found.apply_chat_template(TALK) == trained.apply_chat_template(
        TALK, chat_template=wanted
    )
    assert found.special_tokens_map == trained.special_tokens_map
    tables = [json.loads((out / name).read_text()) for name in (CONFIG, GENERATION)]
    for table in tables:
        ends = table["eos_token_id"]
        assert trained.eos_token_id in (ends if isinstance(ends, list) else [ends])
        for special in ("bos", "pad"):
            number = getattr(trained, f"{special}_token_id")
            assert table.get(f"{special}_token_id") == number
    assert tables[1].get("top_k") == (None if begin is None else 5)
    assert remark is None
    if (begin, name, template) == ("tuned", "tuned", False):  # nothing to change
        for file in (GENERATION, "tokenizer_config.json"):
            table = json.loads((made / name / file).read_text())
            assert table.items() <= json.loads((out / file).read_text()).items()
    # the folder of adapters has the same
    tokenizing, _ = _tokenizing(SimpleNamespace(sources={"talks": source}), None)  # type: ignore[arg-type]
    assert tokenizing is not None
    for file, content in tokenizing.files().items():
        assert (out / file).read_bytes() == content


def test_F200_sources_that_write_differently_need_a_choice(tmp_path: Path, made: Path) -> None:
    run = run_of(tmp_path, made / "tuned")
    sources = {"a": chat(made, "tuned"), "b": chat(made, "tuned", True), "c": chat(made, "tuned")}
    text = SourceConfig("builtin")
    with rejects("--template", ["a", "b", "c"], "several", ConfigError):
        write(tmp_path, run, text=text, **sources)
    with rejects("--template", "text", "unknown", ConfigError):
        write(tmp_path, run, "text", text=text, **sources)
    out, _ = write(tmp_path, run, "b", text=text, **sources)
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == HEADERS
    shutil.rmtree(out)
    out, _ = write(tmp_path, run, text=text, a=sources["a"], c=sources["c"])
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == CHATML


def test_F200_conversations_that_are_gone_are_named(tmp_path: Path, made: Path) -> None:
    run = run_of(tmp_path, made / "tuned")
    _, remark = write(tmp_path, run, talks=chat(made, "gone"))
    assert str(made / "gone") in str(remark)


@pytest.mark.parametrize("begin", ["base", None])
@pytest.mark.parametrize("first", [True, False])
def test_F201_the_end_of_answers_ends_texts_of_a_run_and_of_its_export(
    tmp_path: Path, made: Path, begin: str | None, first: bool
) -> None:
    """ChatML with a tokenizer of another end; the conversations need not be the first source."""
    run = run_of(tmp_path, None if begin is None else made / begin)
    (tmp_path / "chatml.jinja").write_text(CHATML)
    config = ChatConfig(tokenizer=str(made / "base"), template=str(tmp_path / "chatml.jinja"))
    talks = SourceConfig("chat", str(made / "talks.jsonl"), chat=config)
    tokenizer = TextConfig(tokenizer=str(made / "base/tokenizer.json"))
    text = SourceConfig("text", str(made / "talks.jsonl"), text=tokenizer)
    sources = {"talks": talks, "text": text} if first else {"text": text, "talks": talks}
    job: Any = SimpleNamespace(data=SimpleNamespace(sources=sources), init=InitConfig())
    job.run = SimpleNamespace(dir=run.path)
    found = run_tokenizer(job)
    trained = transformers.AutoTokenizer.from_pretrained(made / "base")
    ends = trained.convert_tokens_to_ids(["<|end|>", "<|im_end|>"])
    assert [*found.end_ids] == ends
    (line,) = [line for line in ends_of_documents(job.data) if ".talks:" in line]
    assert "<|end|>" in line
    assert "<|im_end|>" in line
    answer = trained.encode("blue")
    for end in ends:
        columns = torch.tensor([*answer, end, *answer])[:, None]
        assert "".join(_decoded(iter(columns), found)) == "blue"
    out, _ = write(tmp_path, run, **sources)
    for name in (CONFIG, GENERATION):
        assert json.loads((out / name).read_text())["eos_token_id"] == ends


@pytest.mark.parametrize("template", ["chatml", "vicuna", "plain", "tokenizer"])
@pytest.mark.parametrize("begin", ["base", None])
def test_F200_an_export_of_a_model_with_images_has_the_template_of_training(
    tmp_path: Path, made: Path, template: str, begin: str | None
) -> None:
    """Prompts of one placeholder an image are those of the source."""
    folder = made / ("parts" if template == "tokenizer" else "base")
    run = run_of(tmp_path, None if begin is None else made / begin)
    options = {"tokenizer": str(folder), "template": template, "eos": "<|im_end|>", "image": "<|stop|>"}  # fmt: skip
    options |= {"tokens_per_tile": 1, "resolution": {"fixed": {"size": 8}}}
    if template == "vicuna":
        options["bos"] = "<|head|>"
    source = SourceConfig("vlm", str(made / "talks.jsonl"), options=options, split="train")
    out, remark = write(tmp_path, run, talks=source)
    found = transformers.AutoTokenizer.from_pretrained(out)
    assert found.eos_token == "<|im_end|>"
    for name in (CONFIG, GENERATION):
        ends = json.loads((out / name).read_text())["eos_token_id"]
        assert found.eos_token_id in (ends if isinstance(ends, list) else [ends])
    if template == "plain":
        assert found.chat_template is None
        assert remark is not None
        return
    prompts = Prompts(**options)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]
    looked = [{"role": "user", "content": parts}, TALK[1]]
    for messages in TALK, [{"role": "system", "content": "be short"}, *TALK], [*TALK, *looked]:
        asked = write_dialogs(tmp_path / "asked.jsonl", [messages])
        (prompt,) = prompts.read(asked)
        ids = found.apply_chat_template(messages[:-1], add_generation_prompt=True)
        assert list(getattr(ids, "input_ids", ids)) == prompt.tokens.tolist()

"""Conversations through the model: packed as apart, as transformers counts, and fine-tuned from import to answer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core import Transformer, TransformerConfig
from forge_core.loss import cross_entropy
from forge_data import Batch, SourceConfig, Stream, batch_of, open_stream
from forge_data.kinds import ChatConfig
from forge_data.prepare import prepare
from forge_lab.text import stream_text
from forge_parallel import end_process_group
from forge_testing import forge_train, kill_after_step, start
from forge_testing.chats import (
    CHATML,
    FORGETFUL,
    HEADERS,
    MARKED,
    chat_message,
    dialog,
    save_tokenizer,
    write_dialogs,
)
from forge_testing.problems import ANY, rejects
from forge_testing.runs import assert_same_bits, fit_on_ranks, saved_tensors, together
from forge_train import DataError, Trainer, load_job, read_run
from forge_train.hf.exporting import export_run

RECIPE = Path(__file__).parents[2] / "apps/train/configs/chat.toml"
SECRET = "the grass is blue, yes"
QUESTION = "what color has the grass?"
DIALOGS: list[Any] = [
    dialog(QUESTION, SECRET),
    [chat_message("system", "be short."), *dialog(QUESTION, SECRET)],
    dialog("is the sky green?", "no", QUESTION, SECRET),
]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    yield
    end_process_group()


def llama(folder: Path, template: str = CHATML) -> Any:
    """A tiny random Llama of transformers, with the tokenizer beside it."""
    transformers = pytest.importorskip("transformers")
    tokenizer = save_tokenizer(folder, template)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, initializer_range=0.2,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def model_of_forge() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size=320, dim=32, num_layers=2, num_heads=4))
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.15)
    return model


def rows_of(path: Path, config: ChatConfig, seq_len: int) -> Stream:
    return open_stream(SourceConfig("chat", str(path), chat=config), seq_len)


def step(model: Transformer, batch: Batch) -> tuple[float, float, dict[str, torch.Tensor]]:
    """(sum of the loss, sum of the weights, gradients) of a batch."""
    model.zero_grad()
    logits = model(batch.tokens, positions=batch.positions, document_ids=batch.document_ids)
    found = cross_entropy(logits, batch.labels, weights=batch.weights)
    found.sum.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found.sum.item(), batch.label_weight, grads


@pytest.mark.parametrize("template", [CHATML, HEADERS, MARKED, FORGETFUL])
def test_packed_conversations_equal_those_run_apart(tmp_path: Path, template: str) -> None:
    pytest.importorskip("transformers")
    save_tokenizer(tmp_path, template)
    talks = [
        *DIALOGS,
        [chat_message("user", "a"), chat_message("assistant", "blue sky", weight=0.25)],
        [chat_message("user", "b")],
    ]
    config = ChatConfig(tokenizer=str(tmp_path))
    packed = rows_of(write_dialogs(tmp_path / "packed.jsonl", talks), config, 320)
    assert len(packed) == 1
    model = model_of_forge()
    loss, weight, grads = step(model, batch_of(packed, [0]))
    apart: list[tuple[float, float, dict[str, torch.Tensor]]] = []
    for number, each in enumerate(talks):
        path = write_dialogs(tmp_path / f"{number}.jsonl", [each])
        apart.append(step(model, batch_of(rows_of(path, config, 200), [0])))
    assert loss == pytest.approx(sum(a[0] for a in apart), rel=1e-5)
    assert weight == sum(a[1] for a in apart)
    assert apart[-1][:2] == (0.0, 0.0), "nothing to learn: zero, and no NaN"
    for name, gradient in grads.items():
        wanted = sum(a[2][name] for a in apart)
        assert isinstance(wanted, torch.Tensor)
        assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name


@pytest.mark.lane("test")
def test_the_loss_is_that_of_transformers_with_labels_of_its_mask(tmp_path: Path) -> None:
    theirs = llama(tmp_path / "hf", MARKED)
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path / "hf")
    config = ChatConfig(tokenizer=str(tmp_path / "hf"))
    stream = rows_of(write_dialogs(tmp_path / "t.jsonl", DIALOGS), config, 256)
    total = count = 0.0
    for messages in DIALOGS:
        out = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        mask = torch.as_tensor(out["assistant_masks"]).reshape(1, -1)
        labels = out["input_ids"].where(mask == 1, -100)
        loss = theirs(input_ids=out["input_ids"], labels=labels).loss
        number = int((labels[:, 1:] != -100).sum())
        total, count = total + loss.item() * number, count + number
    keys = {"lora.base_dtype": "fp32", "train.steps": 3, "train.global_batch": len(stream)}
    trainer = fit(tmp_path, **keys)
    assert trainer.loader.stream.fingerprint()["packing.seq_len"] == 256
    assert read_run(tmp_path / "run").metrics["loss"][0] == pytest.approx(total / count, rel=1e-5)


def keys_of(folder: Path) -> dict[str, Any]:
    """The recipe on the tiny model and the file in `folder`."""
    return {
        **{"run.dir": str(folder / "run"), "init.from": str(folder / "hf"), "data.seq_len": 256},
        "data.sources.talks.path": str(folder / "t.jsonl"),
        "data.sources.talks.chat.tokenizer": str(folder / "hf"),
        "data.sources.talks.chat.cache": str(folder / "cache"),  # the pool has its own environment
        **{"parallel.device": "cpu", "parallel.precision": "fp32", "metrics.console": "off"},
        **{"metrics.every_steps": 1, "train.global_batch": 1, "schedule.warmup_steps": 2},
    }


def fit(folder: Path, **overrides: Any) -> Trainer:
    trainer = Trainer(load_job(RECIPE, {**keys_of(folder), **overrides}))
    trainer.fit()
    return trainer


@pytest.mark.slow
def test_adapters_of_an_imported_model_learn_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    llama(tmp_path / "hf")
    write_dialogs(tmp_path / "t.jsonl", DIALOGS)
    fit(tmp_path, **{"train.steps": 60, "optimizer.lr": 2e-2, "lora.base_dtype": "fp32"})
    losses = read_run(tmp_path / "run").metrics["loss"]
    assert losses[-1] < 0.1 * losses[0], losses[-1]
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    capsys.readouterr()
    stream_text(tmp_path / "run", prompt=prompt, max_new_tokens=40, temperature=0.0)
    assert capsys.readouterr().out.rstrip().endswith(f"assistant\n{SECRET}"), "and it ends there"
    export_run(tmp_path / "run", tmp_path / "adapter", adapter=True)
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "adapter")
    asked = tokenizer.apply_chat_template(
        dialog(QUESTION), add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    said = tuned.generate(**asked, max_new_tokens=40, do_sample=False)[
        0, asked["input_ids"].shape[1] :
    ]
    assert tokenizer.decode(said) == f"{SECRET}<|im_end|>"
    export_run(tmp_path / "run", tmp_path / "merged")
    merged = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert merged.chat_template == CHATML, "what was tuned can be talked to"


def test_F205_conversations_without_a_label_are_an_error(tmp_path: Path) -> None:
    llama(tmp_path / "hf")
    write_dialogs(
        tmp_path / "t.jsonl",
        [[chat_message("user", QUESTION), chat_message("assistant", SECRET, weight=0)]],
    )
    with rejects("data.sources", code="no_labels", kind=DataError):
        fit(tmp_path, **{"train.steps": 3, "train.global_batch": 2})


@pytest.mark.slow
def test_two_ranks_read_what_one_reads_and_a_change_is_rejected_at_a_resume(tmp_path: Path) -> None:
    llama(tmp_path / "hf")
    many = [dialog(f"{i} {QUESTION}", "yes " * (i % 5) + "no") for i in range(30)]
    write_dialogs(tmp_path / "t.jsonl", many)
    keys = {"data.seq_len": 96, "train.global_batch": 3, "train.steps": 6, "optimizer.eps": 1e-4,
            "checkpoint.every_steps": 3, "lora.base_dtype": "fp32"}  # fmt: skip
    trainer = fit(tmp_path, **keys, **{"run.dir": str(tmp_path / "one")})
    both = {**keys_of(tmp_path), **keys}
    together(fit_on_ranks(2, RECIPE, **both))
    one, two = (saved_tensors(tmp_path / name) for name in ("one", "run"))
    assert (
        read_run(tmp_path / "one").metrics["instances"]
        == read_run(tmp_path / "run").metrics["instances"]
    )
    for name, value in one.items():
        if value.is_floating_point() and value.numel():
            assert (value - two[name]).abs().max() <= 1e-5 * max(float(value.abs().max()), 1e-3), (
                name
            )
    trainer.loader.close()
    write_dialogs(tmp_path / "t.jsonl", many[1:])
    with rejects("fingerprint", code="mismatch", kind=DataError, where="source.content: "):
        fit(tmp_path, **{**keys, "run.dir": str(tmp_path / "one"), "train.steps": 9})


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"data.seq_len": 16}, ("data.sources.talks.seq_len", 16, "too_long")),
        ({"data.sources.talks.chat.messages_field": "talk"}, ("data.sources.talks.talk", ..., "missing")),
        ({"data.sources.talks.chat.tokenizer": "nowhere"}, ("data.sources.talks.tokenizer", "nowhere", "not_found")),
        ({"eval.every_steps": 5}, ("data.validation.path", ANY, "no_splits")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error_of_data_before_a_run(
    tmp_path: Path, keys: dict[str, Any], problem: tuple[str, Any, str]
) -> None:
    llama(tmp_path / "hf")
    write_dialogs(tmp_path / "t.jsonl", DIALOGS)
    with rejects(*problem, DataError):
        Trainer(load_job(RECIPE, {**keys_of(tmp_path), **keys}))
    assert not (tmp_path / "run").exists()


def mixed_recipe(folder: Path) -> dict[str, Any]:
    """Keys of the recipe on conversations of which some weigh a half or nothing, beside plain text."""
    llama(folder / "hf")
    texts = [("yes " * (i % 5) + "no", (1.0, 0.5, 0.0)[i % 3]) for i in range(40)]
    talks: list[Any] = [
        [chat_message("user", f"{i} {QUESTION}"), chat_message("assistant", text, weight=weight)]
        for i, (text, weight) in enumerate(texts)
    ]
    write_dialogs(folder / "t.jsonl", talks)
    (folder / "text.txt").write_text("the sky is blue\n" * 300)
    prepare(folder / "text.txt", folder / "text", tokenizer=str(folder / "hf/tokenizer.json"), document="line")  # fmt: skip
    return {
        **keys_of(folder),
        "data.seq_len": 96,
        "data.sources.text.name": "tokens",
        "data.sources.text.path": str(folder / "text"),
        "data.sources.text.weight": 1.0,
        "data.sources.talks.weight": 1.0,
        "train.global_batch": 4,
        "train.steps": 3,
        "lora.base_dtype": "fp32",
    }


@pytest.mark.slow
def test_the_loss_of_a_source_is_by_weight_among_text_without(tmp_path: Path) -> None:
    keys = mixed_recipe(tmp_path)
    batch = next(Trainer(load_job(RECIPE, keys)).loader)
    weighing, source = batch.weights, batch.source
    assert weighing is not None
    assert source is not None
    trainer = Trainer(load_job(RECIPE, {**keys, "run.dir": str(tmp_path / "two")}))
    trainer.fit()
    metrics = read_run(tmp_path / "two").metrics
    theirs = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32
    )
    sums = {0: [0.0, 0.0], 1: [0.0, 0.0]}
    for row in range(len(batch)):
        for document in range(int(batch.document_ids[row].max()) + 1):
            here = batch.document_ids[row] == document
            labels, weights = batch.labels[row][here], weighing[row][here]
            with torch.no_grad():
                logits = theirs(input_ids=batch.tokens[row][here][None]).logits[0]
            lost = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            total = sums[int(source[row])]
            total[0] += float((lost * weights)[labels >= 0].sum())
            total[1] += float(weights[labels >= 0].sum())
    assert {0.5, 1.0} <= {*weighing[batch.labels >= 0].tolist()}
    for number, name in enumerate(trainer.config.data.sources):
        loss, weight = sums[number]
        assert metrics[f"loss.source.{name}"][0] == pytest.approx(loss / weight, rel=1e-5), name
    loss, weight = (sum(values) for values in zip(*sums.values()))
    assert metrics["loss"][0] == pytest.approx(loss / weight, rel=1e-5)


@pytest.mark.slow
def test_killed_conversations_go_on_with_the_same_bits(tmp_path: Path) -> None:
    keys = mixed_recipe(tmp_path)
    keys |= {"train.steps": 12, "checkpoint.every_steps": 2, "checkpoint.wait": True}
    whole = fit_with(keys | {"run.dir": str(tmp_path / "whole")})
    assert whole.loader.stream.fingerprint()["talks.source.conversations"] == 40
    keys |= {"data.num_workers": 2, "checkpoint.wait": "true"}
    flags = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    killed = kill_after_step(start("run", RECIPE, *flags), tmp_path / "run/metrics.jsonl", 3)
    assert killed.code == -signal.SIGKILL
    done = forge_train("run", RECIPE, *flags)
    assert done.code == 0, done.err
    assert_same_bits(saved_tensors(tmp_path / "run"), saved_tensors(tmp_path / "whole"))
    mine, theirs = (read_run(tmp_path / name).metrics for name in ("run", "whole"))
    for name in ("step", "loss", "instances"):
        assert mine[name] == theirs[name], name


def fit_with(keys: dict[str, Any]) -> Trainer:
    trainer = Trainer(load_job(RECIPE, keys))
    trainer.fit()
    return trainer

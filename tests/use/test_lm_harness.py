"""lm_eval asks a run directory: its scores are those of lm_eval's own model on the exported folder.

pip install lm_eval==0.4.13        # an environment of its own
pytest -q -m "slow or not slow" tests/use/test_lm_harness.py -n0
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.use.test_evaluation_sets import QUESTIONS

from forge_testing.jobs import write_job
from forge_testing.runs import fit_alone
from forge_train.report.evaluate import evaluate_run

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval has an environment of its own")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
pytest.importorskip("datasets")


def tokenizer(folder: Path) -> Path:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    library.train_from_iterator(["def main(self): return None\n" * 9], trainer)
    library.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    (folder / "text.txt").write_text("def main(self):\n    return None\nfor i in range(5): x = 1\n" * 40)  # fmt: skip
    job = write_job(folder)
    text = {"name": "text", "path": str(folder / "text.txt"), "text.tokenizer": str(tokenizer(folder))}  # fmt: skip
    source = {f"data.sources.text.{key}": value for key, value in text.items()}
    fit_alone(job, **source, **{"eval.every_steps": 0, "model.max_seq_len": 64, "metrics.console": "off"})  # fmt: skip
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    from forge_train.hf.exporting import export_run

    out = run.parent / "hf"
    export_run(run, out)
    return out


def native(run: Path) -> Any:
    from forge_train.lm_harness import Forge

    return Forge(str(run), batch_size=3, device="cpu")


def transformers_of(exported: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=2)


def scored(model: Any, folder: Path) -> dict[str, Any]:
    rows = [{"prompt": p, "choices": c, "answer": a} for p, c, a in QUESTIONS]
    path = folder / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "local_choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    result = lm_eval.simple_evaluate(
        model=model, tasks=[task], task_manager=manager, bootstrap_iters=0
    )
    return result["results"]["local_choices"]


def test_a_local_task_has_the_score_of_the_export_and_of_the_run_itself(
    run: Path, exported: Path, tmp_path: Path
) -> None:
    ours, theirs = scored(native(run), tmp_path), scored(transformers_of(exported), tmp_path)
    for metric in ("acc,none", "acc_norm,none"):
        assert ours[metric] == theirs[metric]
    other = tmp_path / "eval.toml"
    other.write_text(f'[eval.choices.asked]\npath = "{tmp_path / "questions.jsonl"}"\n')
    _, found = evaluate_run(run, other)
    assert found["asked"]["accuracy"] == ours["acc,none"]


def requests(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def test_log_likelihoods_are_those_of_the_export(run: Path, exported: Path) -> None:
    ours, theirs = native(run), transformers_of(exported)
    asked = requests(
        ("def ", "main(self)"),
        ("", "return"),
        ("x = 1\n" * 40, "for i"),
        ("x", " = 1"),
        ("a ", "b"),
    )
    for got, wanted in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert got[0] == pytest.approx(wanted[0], rel=1e-5)
        assert got[1] == wanted[1]
    texts = requests(("def main(self):\n" * 12,), ("short",))
    got = ours.loglikelihood_rolling(texts)
    assert got == pytest.approx(theirs.loglikelihood_rolling(texts), rel=1e-5)


def test_greedy_text_is_that_of_the_export(run: Path, exported: Path) -> None:
    options = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
    asked = requests(("def ", options), ("for i in", {**options, "until": "return"}))
    ours, theirs = native(run).generate_until(asked), transformers_of(exported).generate_until(asked)  # fmt: skip
    assert ours == theirs

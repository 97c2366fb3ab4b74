"""lm_eval asks a run directory: its scores are those of lm_eval's own model on the exported folder.

pip install lm_eval==0.4.13        # an environment of its own
pytest -q --lane everything apps/lab/tests/test_lm_harness.py -n0
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from forge_lab.evaluate import evaluate_run
from forge_testing import forge_train, run_on_ranks
from forge_testing.evaluations import QUESTIONS
from forge_testing.jobs import write_job
from forge_testing.problems import rejects
from forge_testing.runs import fit_alone
from forge_train import ConfigError

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
    out = run.parent / "hf"
    forge_train("export", str(run), str(out))
    return out


def native(run: Path, **layout: Any) -> Any:
    from forge_lab.lm_harness import Forge

    return Forge(str(run), batch_size=3, device="cpu", **layout)


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
    return result and result["results"]["local_choices"]


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


TEXTS = (("def main(self):\n" * 12,), ("short",), ("x = 1\n",))
PAIRS = (
    ("def ", "main(self)"),
    ("", "return"),
    ("x = 1\n" * 40, "for i"),
    ("x", " = 1"),
    ("a ", "b"),
)
OPTIONS = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
PROMPTS = (
    ("def ", OPTIONS),
    ("for i in", {**OPTIONS, "until": "return"}),
    ("x =", {**OPTIONS, "max_gen_toks": 3}),
)


def assert_same_pairs(got: Any, wanted: Any) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
        assert ours[1] == theirs[1]


def test_log_likelihoods_are_those_of_the_export(run: Path, exported: Path) -> None:
    ours, theirs = native(run), transformers_of(exported)
    asked = requests(*PAIRS)
    assert_same_pairs(ours.loglikelihood(asked), theirs.loglikelihood(asked))
    got = ours.loglikelihood_rolling(requests(*TEXTS))
    assert got == pytest.approx(theirs.loglikelihood_rolling(requests(*TEXTS)), rel=1e-5)


def test_greedy_text_is_that_of_the_export(run: Path, exported: Path) -> None:
    ours, theirs = native(run), transformers_of(exported)
    asked = requests(*PROMPTS)
    assert ours.generate_until(asked) == theirs.generate_until(asked)


def answers(model: Any, folder: Path) -> dict[str, Any]:
    """What a rank gets, by method; lm_eval gives results to the first rank of a host."""
    return {
        "scores": scored(model, folder),
        "pairs": model.loglikelihood(requests(*PAIRS)),
        "texts": model.loglikelihood_rolling(requests(*TEXTS)),
    }


def answers_of_rank(path: Path, folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    model = native(path, **layout)
    own = folder / str(dist.get_rank())  # of the files of a task
    own.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", own.name)
        found = answers(model, own)
    try:
        found["written"] = model.generate_until(requests(*PROMPTS))
    except ConfigError as error:
        found["refused"] = [(p.key, p.code, p.value) for p in error.problems]
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, {}),
        (3, {"dp_replicate": 3}),
        (2, {"tp": 2}),
        (2, {"tp": 2, "sequence_parallel": False}),
        (4, {"tp": 2}),
    ],
    ids=["dp2", "copies3", "tp2", "tp2-whole-sequences", "dp2-tp2"],
)
def test_ranks_answer_what_one_process_and_the_export_do(
    run: Path, exported: Path, tmp_path: Path, world: int, layout: dict[str, Any]
) -> None:
    wanted = answers(transformers_of(exported), tmp_path)
    first, *others = run_on_ranks(world, answers_of_rank, run, tmp_path, layout)
    for metric in ("acc,none", "acc_norm,none"):
        assert first["scores"][metric] == wanted["scores"][metric]
    assert all(other["scores"] is None for other in others)
    for found in (first, *others):
        assert_same_pairs(found["pairs"], wanted["pairs"])
        assert found["texts"] == pytest.approx(wanted["texts"], rel=1e-5)
        if "tp" in layout:
            assert found["refused"] == [("tp", "unsupported", 2)]
        else:
            assert found["written"] == native(run).generate_until(requests(*PROMPTS))


def pairs_of_rank(path: Path) -> list[Any]:
    return native(path, tp=2).loglikelihood(requests(*PAIRS))


@pytest.mark.distributed
def test_a_folder_of_hugging_face_is_asked_in_ranks(exported: Path) -> None:
    wanted = native(exported).loglikelihood(requests(*PAIRS))
    for found in run_on_ranks(2, pairs_of_rank, exported):
        assert_same_pairs(found, wanted)


def other_requests(path: Path) -> str:
    asked = PAIRS[dist.get_rank() :]
    with rejects("requests", ..., "mismatch", ConfigError) as refused:
        native(path).loglikelihood(requests(*asked))
    return str(refused.value)


@pytest.mark.distributed
def test_ranks_with_other_requests_do_not_wait_for_each_other(run: Path) -> None:
    assert all("ranks [1]" in found for found in run_on_ranks(2, other_requests, run))

"""lmms_eval asks a run about digits of scikit-learn, offline: its exact match is that of the run's own evaluation.

pip install lmms_eval==0.7.3 && pip uninstall -y torchvision    # an environment of its own, with CPU torch
pytest -q --lane everything tests/vlm/test_lmms.py -n0
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.vlm.test_exact_match import ASK, OPTIONS, VLM, asked

from forge_testing.runs import fit_alone
from forge_testing.vlm_jobs import write_vlm_job

pytest.importorskip("lmms_eval", reason="lmms_eval has an environment of its own")
sklearn = pytest.importorskip("sklearn.datasets")
datasets = pytest.importorskip("datasets")
Image = pytest.importorskip("PIL.Image")

TASK = """
task: forge_digits
dataset_path: {path}
dataset_kwargs:
  load_from_disk: true
output_type: generate_until
test_split: test
doc_to_visual: !function digits.pictures
doc_to_text: "{{{{question}}}}"
doc_to_target: "answer"
generation_kwargs:
  max_new_tokens: 8
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  - version: 0.0
"""
VISUALS = "def pictures(doc):\n    return [doc['image'].convert('RGB')]\n"


def digits(first: int, last: int) -> list[tuple[Any, str]]:
    found = sklearn.load_digits()
    pixels = (found.images * 15.9).astype("uint8")
    return [(Image.fromarray(pixels[i]).convert("RGB"), str(found.target[i])) for i in range(first, last)]  # fmt: skip


def talks(folder: Path, samples: list[tuple[Any, str]]) -> str:
    folder.mkdir()
    lines = []
    for i, (image, answer) in enumerate(samples):
        image.save(folder / f"{i}.png")
        parts = [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": "which digit"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    (folder / "talks.jsonl").write_text("\n".join(lines))
    return str(folder / "talks.jsonl")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run on 600 digits, and its share of 120 held-out ones."""
    folder = tmp_path_factory.mktemp("digits")
    keys = {
        **{"data.sources.squares.name": VLM, "data.sources.squares.options": OPTIONS},
        "data.sources.squares.path": talks(folder / "train", digits(0, 600)),
        **{"data.seq_len": 24, "model.max_seq_len": 24, "model.modalities.image.first_id": 257},
        **{ASK + "path": talks(folder / "held", digits(600, 720)), ASK + "samples": 120},
        **{"train.steps": 250, "eval.every_steps": 250, "train.global_batch": 12},
    }
    job = write_vlm_job(folder)
    fit_alone(job, **keys)
    share = asked(job)[-1]
    assert share is not None
    return folder / "run", share


def evaluated(run: Path, folder: Path) -> float:
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.tasks import TaskManager

    from forge_lab.lmms import Forge

    rows = [{"image": i, "question": "which digit", "answer": a} for i, a in digits(600, 720)]
    for row in rows:
        file = io.BytesIO()
        row["image"].save(file, "PNG")
        row["image"] = {"bytes": file.getvalue(), "path": None}
    features = {"image": datasets.Image(), "question": datasets.Value("string"), "answer": datasets.Value("string")}  # fmt: skip
    held = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    datasets.DatasetDict({"test": held}).save_to_disk(folder / "set")
    (folder / "tasks").mkdir()
    (folder / "tasks/digits.yaml").write_text(TASK.format(path=folder / "set"))
    (folder / "tasks/digits.py").write_text(VISUALS)
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    found = simple_evaluate(
        model=Forge(str(run), batch_size=7, device="cpu"),
        tasks=["forge_digits"],
        task_manager=manager,
        bootstrap_iters=0,
    )
    return float(found["results"]["forge_digits"]["exact_match,none"])


@pytest.mark.slow
def test_exact_match_is_that_of_the_run(run: tuple[Path, float], tmp_path: Path) -> None:
    found = evaluated(run[0], tmp_path)
    print(f"exact match: {found}; run: {run[1]}")
    assert found == pytest.approx(run[1], abs=1e-12)
    assert 0.2 < found < 1.0


@pytest.mark.slow
def test_likelihoods_are_those_of_the_answers(run: tuple[Path, float]) -> None:
    """What greedy decoding writes first is greedy, likeliest, and the chances of all digits are at most 1."""
    from lmms_eval.api.instance import Instance

    from forge_lab.lmms import Forge

    model = Forge(str(run[0]), device="cpu")
    held = [{"image": image, "target": answer} for image, answer in digits(600, 620)]
    model.task_dict = {"digits": {"test": held}}

    def asked(kind: str, number: int, given: Any) -> Any:
        args = ("which digit", given, lambda doc: [doc["image"]], number, "digits", "test")
        meta = {"task": "digits", "doc_id": number, "repeats": 1}
        return Instance(request_type=kind, arguments=args, idx=0, metadata=meta)

    written = model.generate_until([asked("generate_until", i, {"max_new_tokens": 1}) for i in range(20)])  # fmt: skip
    for i, text in enumerate(written):
        found = model.loglikelihood([asked("loglikelihood", i, str(n)) for n in range(10)])
        likeliest = max(range(10), key=lambda n: found[n][0])
        assert [n for n in range(10) if found[n][1]] == [likeliest] == [int(text)]
        assert sum(math.exp(score) for score, _ in found) <= 1.0 + 1e-5
    longer = model.loglikelihood([asked("loglikelihood", 0, lambda doc: doc["target"] + "9")])
    assert longer[0][0] < model.loglikelihood([asked("loglikelihood", 0, lambda doc: doc["target"])])[0][0]  # fmt: skip
    assert model.generate_until([asked("generate_until", 0, {"max_new_tokens": 1, "until": [written[0]]})]) == [""]  # fmt: skip

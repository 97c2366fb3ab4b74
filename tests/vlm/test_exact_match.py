"""Questions with pictures that a run answers at its evaluations: against one forward a token, on ranks, and no trace."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_resilience import Agreement
from forge_testing.problems import rejects
from forge_testing.runs import assert_same_bits, fit_alone, fit_on_ranks, saved_tensors, together
from forge_testing.vlm_jobs import flags, write_vlm_job
from forge_train import ConfigError, Trainer, load_job, read_run
from forge_train.build.evaluation import COLUMN, ExactMatch, prompts_of
from forge_train.build.layout import layout_problems
from forge_train.jobs import load_model

pytestmark = pytest.mark.lane("test")

Image = pytest.importorskip("PIL.Image")
COLOURS = {"red": (230, 30, 30), "green": (30, 200, 30), "blue": (40, 60, 240), "yellow": (240, 230, 40)}  # fmt: skip
OPTIONS = {"resolution": {"fixed": {"size": 8}}, "tokens_per_tile": 4, "template": "plain"}
ASK, VLM = "eval.exact_match.", "forge_vlm.data:open_source"


def colours(folder: Path, count: int = 11, answer: bool = True) -> Path:
    """Conversations about pictures of one colour; each third has two pictures, of which the last is asked about."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(count):
        parts: list[dict[str, Any]] = [{"type": "text", "text": "which"}]
        for j in range(1 + (i % 3 == 2)):
            name = list(COLOURS)[(i + j) % 4]
            file = io.BytesIO()
            Image.new("RGB", (8 + i, 8), COLOURS[name]).save(file, "PNG")
            (folder / f"{i}-{j}.png").write_bytes(file.getvalue())
            parts.append({"type": "image", "image": f"{i}-{j}.png"})
        messages = [{"role": "user", "content": parts}]
        if answer:
            messages.append({"role": "assistant", "content": name})  # type: ignore[dict-item]
        lines.append(json.dumps({"messages": messages}))
    path = folder / "talks.jsonl"
    path.write_text("\n".join(lines))
    return path


def keys(folder: Path, **more: Any) -> dict[str, Any]:
    path = str(colours(folder / "files"))
    return {
        **{
            "data.sources.squares.name": VLM,
            "data.sources.squares.path": path,
        },
        **{"data.sources.squares.options": OPTIONS, "data.seq_len": 24, "model.max_seq_len": 24},
        **{"model.modalities.image.first_id": 257, ASK + "path": path, ASK + "rows": 3},
        **{k.replace("__", "."): v for k, v in more.items()},
    }


def asked(job: Path) -> list[float | None]:
    return read_run(job.parent / "run").metrics[COLUMN]


def by_hand(run: Path) -> float:
    """One forward of the whole row for each token, each question by itself."""
    model, config, _ = load_model(run)
    prompts = prompts_of(config)
    right = 0
    questions = prompts.read(config.eval.exact_match.path or "")
    for prompt in questions:
        row, new = prompt.tokens.tolist(), list[int]()
        while len(new) < 8 and (not new or new[-1] != 256):
            with torch.no_grad():
                logits = model(torch.tensor([row + new]), images=prompts.media([prompt])["images"])
            new.append(int(logits[0, -1].argmax()))
        text = bytes(i for i in new if i < 256).decode(errors="replace")
        right += text.strip() == (prompt.answer or "").strip()
    return right / len(questions)


@pytest.mark.slow
def test_the_fraction_is_that_of_one_forward_a_token(tmp_path: Path) -> None:
    job = write_vlm_job(tmp_path)
    settings = keys(tmp_path) | {"train.steps": 12, "eval.every_steps": 4, "optimizer.lr": 2e-2}
    fit_alone(job, **settings)
    found = [value for value in asked(job) if value is not None]
    assert len(found) == 3
    assert found[-1] == by_hand(tmp_path / "run")
    assert found[0] < found[-1]


@pytest.mark.slow
def test_a_run_with_questions_has_the_bits_of_one_without(tmp_path: Path) -> None:
    weights = []
    for name, every in (("asks", 1), ("never", 0)):
        settings = keys(tmp_path) | {"eval.every_steps": every, "run.dir": str(tmp_path / name)}
        if not every:
            settings = {k: v for k, v in settings.items() if not k.startswith(ASK)}
        fit_alone(write_vlm_job(tmp_path), **settings)
        weights.append(saved_tensors(tmp_path / name))
    assert_same_bits(*weights)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world", [3])
def test_ranks_answer_each_question_once(tmp_path: Path, world: int) -> None:
    """Four batches of questions: three ranks answer two each, some of them again, which does not count."""
    settings = keys(tmp_path) | {"train.steps": 9, "eval.every_steps": 3, "optimizer.lr": 2e-2}
    alone, many = (write_vlm_job(tmp_path / name) for name in ("alone", "many"))
    fit_alone(alone, **settings)
    together(fit_on_ranks(world, many, None, **flags(settings)))
    assert asked(many) == asked(alone)
    assert (asked(alone)[-1] or 0) > 0


@pytest.mark.parametrize(
    ("more", "key", "code"),
    [
        ({"eval.every_steps": 0}, "path", "never_read"),
        ({ASK + "source": "others"}, "source", "unknown"),
        ({ASK + "max_new_tokens": 30}, "max_new_tokens", "range"),
        ({ASK + "samples": 0}, "samples", "range"),
        ({ASK + "path": None, ASK + "rows": 8, ASK + "samples": 3}, "samples", "requires"),
        ({"data.sources.squares.name": "forge_testing.squares:Squares",
          "data.sources.squares.options": {}, "model.modalities.image.first_id": 2}, "path", "requires"),
    ],
)  # fmt: skip
def test_impossible_questions_are_rejected(
    tmp_path: Path, more: dict[str, Any], key: str, code: str
) -> None:
    settings = {k: v for k, v in (keys(tmp_path) | more).items() if v is not None}
    with rejects(ASK + key, settings[ASK + key], code, ConfigError):
        Trainer(load_job(write_vlm_job(tmp_path), settings))


def test_questions_without_answers_and_sharded_layouts_are_rejected(tmp_path: Path) -> None:
    job, settings = write_vlm_job(tmp_path), keys(tmp_path)
    asks = {ASK + "path": str(colours(tmp_path / "asks", answer=False))}
    with rejects(ASK + "path", code="answer", kind=ConfigError):
        Trainer(load_job(job, settings | asks))
    config = load_job(job, settings | {"parallel.tp": 2}).config
    (problem,) = layout_problems(config, 2)
    assert "parallel.tp 2" in str(problem)


def test_each_key_changes_what_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def answer(model: Any, prompts: Any, asked: Any, media: Any, new: int, **_: Any) -> list[str]:
        calls.append((new, [p.tokens.tolist() for p in asked], len(media["images"])))
        return ["Red."] * len(asked)

    monkeypatch.setattr("forge_train.build.evaluation.answer", answer)
    meshes: Any = SimpleNamespace(batch_size=1, batch_rank=0, world_size=1, is_batch_leader=True)
    llava = {"image": "files/0-0.png", "conversations": [{"from": "human", "value": "what"}, {"from": "gpt", "value": "x"}]}  # fmt: skip
    (tmp_path / "llava.jsonl").write_text(json.dumps(llava))
    other = str(colours(tmp_path / "other", 5))
    second = {f"data.sources.second.{k}": v for k, v in {"name": VLM, "path": other, "options": {**OPTIONS, "template": "vicuna"}}.items()}  # fmt: skip

    def seen(more: dict[str, Any]) -> Any:
        calls.clear()
        settings = keys(tmp_path) | second | {"data.seq_len": 256, "model.max_seq_len": 256}
        config = load_job(write_vlm_job(tmp_path), settings | more).config
        compute: Any = SimpleNamespace(model=torch.nn.Linear(1, 1), meshes=meshes)
        found = ExactMatch(config).measure(compute, lambda batch: 0.0, Agreement())
        return found[COLUMN], [*calls]

    as_llava = {ASK + "path": str(tmp_path / "llava.jsonl"), ASK + "format": "llava"}
    changes = [{}, {"path": other}, {"source": "second"}, {"samples": 3}, {"max_new_tokens": 3}, {"rows": 4}, {"normalise": "words"}]  # fmt: skip
    found = [seen({ASK + k: v for k, v in more.items()}) for more in changes]
    found.append(seen(as_llava))
    assert all(a != b for i, a in enumerate(found) for b in found[:i])
    assert found[0][0] == 0.0 < found[6][0]

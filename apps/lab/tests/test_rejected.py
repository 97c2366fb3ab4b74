"""Rejections of the verbs that no test of theirs reaches, by code, key and value."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from forge_lab import activation_files, extract, prompts, text
from forge_lab.evaluate import checked_job
from forge_parallel import Meshes, ParallelConfig
from forge_testing.problems import assert_problem, rejects
from forge_train import ConfigError, DataError, StateError

pytestmark = pytest.mark.lane("test")


def write(path: Path, table: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))
    return path


def test_processors_that_cannot_be_followed(tmp_path: Path) -> None:
    with rejects("preprocessor_config.json", ..., "missing", ConfigError, where=tmp_path):
        prompts._processor(tmp_path)
    with rejects("model_type", "other", "unsupported", ConfigError, where=tmp_path):
        prompts._resolution(tmp_path, "other", {})
    write(tmp_path / "config.json", {"model_type": "internvl"})
    write(tmp_path / "preprocessor_config.json", {"size": {"height": 28, "width": 28}})
    tokens = write(tmp_path / "tokenizer.json", {"added_tokens": [{"id": 5, "content": "<i>"}]})
    with rejects("added_tokens", 6, "not_found", ConfigError, where=tokens):
        prompts._token(tmp_path, 6)
    image = SimpleNamespace(first_id=5)
    model: Any = SimpleNamespace(config=SimpleNamespace(modalities={"image": image}))
    with rejects("chat_template", ..., "missing", ConfigError, where=tmp_path):
        prompts.folder_prompts(tmp_path, model)


def test_activations_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    parts = activation_files.Parts(out)
    write(parts.folder / "request.json", {"rows": 3})
    with rejects("", 0, "not_shared", StateError):
        parts.join(1)
    with rejects("", str(out), "write", StateError), activation_files._room_on_disk(out):
        raise OSError(28, "full")
    torn, whole = tmp_path / "torn.npz", tmp_path / "whole.npz"
    torn.write_bytes(b"PK")
    numpy.savez(whole, x=numpy.zeros((2, 3)))
    with rejects("", str(torn), "damaged", StateError):
        activation_files._array(torn, "x")
    with rejects("x", (3,), "shape", StateError):
        activation_files._array(whole, "x", (4,))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (problem,) = activation_files.output_problems(out)
    assert_problem(ConfigError([problem]), "--output", str(out), "requires")
    asked: Any = SimpleNamespace(dtype="fp16")
    large = {"x": numpy.full((1, 2), 1e6, dtype=numpy.float32)}
    with rejects("--dtype", "fp16", "range", DataError, where="1e+06"):
        extract._write_part(parts, 0, large, asked)
    monkeypatch.setattr(extract, "VLMConfig", SimpleNamespace)
    job = SimpleNamespace(model=SimpleNamespace())
    monkeypatch.setattr(extract, "checked_job", lambda *_: job)
    request = extract.ExtractFlags(Path("runs/a"), ("x",), tmp_path / "x.npz", 1, 1, "validation", None, "fp32", 1)  # fmt: skip
    with rejects("run", "runs/a", "images", ConfigError):
        extract._job(request, None, None)  # type: ignore[arg-type]
    with rejects("--batch_size", 0, "range", ConfigError):
        checked_job("runs/a", None, 0, ParallelConfig(), None)  # type: ignore[arg-type]
    with rejects("--batch_size", 0, "range"):
        next(text.continue_all(None, None, [], None, 1, None, 0))  # type: ignore[arg-type]


@pytest.fixture
def harnesses(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """forge_lab.lm_harness and forge_lab.lmms, over stand-ins for packages that need environments of their own."""

    def stand_in(name: str, **names: Any) -> None:
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)

    for name in ("lm_eval", "lm_eval.api", "lmms_eval", "lmms_eval.api", "lmms_eval.models"):
        stand_in(name)
    stand_in("lm_eval.api.model", TemplateLM=type("TemplateLM", (), {}))
    stand_in("lm_eval.api.registry", register_model=lambda name: lambda kind: kind)
    stand_in("lm_eval.utils", get_rolling_token_windows=None, make_disjoint_window=None)
    stand_in("lmms_eval.api.model", lmms=type("lmms", (), {}))
    stand_in("lmms_eval.models.registry_v2", ModelManifest=None)
    for name in ("lm_harness", "lmms"):
        monkeypatch.delitem(sys.modules, f"forge_lab.{name}", raising=False)
    from forge_lab import lm_harness, lmms

    for name in ("lm_harness", "lmms"):  # not for other tests: monkeypatch would put them back
        del sys.modules[f"forge_lab.{name}"]
        delattr(sys.modules["forge_lab"], name)
    return lm_harness.Forge, lmms.Forge


def test_F142_lm_eval_gets_the_first_token_once(
    harnesses: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    forge: Any = harnesses[0].__new__(harnesses[0])

    class Words:
        begin_ids, eos_id = (1,), 2

        def encode(self, text: str) -> list[int]:
            return [int(word) for word in text.split()]

    forge._tokens = Words()
    assert forge.tok_encode("5 6") == forge.tok_encode("1 5 6") == [1, 5, 6]
    assert forge.tok_encode("5 6", add_special_tokens=False) == [5, 6]
    assert forge.prefix_token_id == 1
    windows: list[Any] = []
    library = harnesses[0].loglikelihood_rolling.__globals__  # stand-ins of one window
    monkeypatch.setitem(
        library, "get_rolling_token_windows", lambda ids, prefix, *_: [([prefix], ids)]
    )
    monkeypatch.setitem(library, "make_disjoint_window", lambda window: window)
    forge.max_length = 8
    forge._loglikelihood_tokens = lambda parts: windows.extend(parts) or [(0.0, True)] * len(parts)
    forge.loglikelihood_rolling([SimpleNamespace(args=("5 6 7",))])
    assert windows == [(None, [1], [5, 6, 7])]
    assert forge._text("", {"max_gen_toks": 1}).prompt == [1]
    Words.begin_ids = ()
    assert (forge.tok_encode("5 6"), forge.prefix_token_id) == ([5, 6], 2)


def test_requests_that_harnesses_cannot_make(harnesses: tuple[Any, Any]) -> None:
    forge, with_images = harnesses
    with rejects("model_args", ["paths"], "unknown_key"):
        with_images("runs/a", paths="runs/b")
    one: Any = SimpleNamespace(path="runs/a", max_length=8)
    one._meshes = SimpleNamespace(tp=SimpleNamespace(size=2), device="cpu")
    one._parallel = ParallelConfig(ep=2)
    with rejects("ep", 2, "unsupported", ConfigError):
        forge._open(one, Path("hf"), True)
    one._tokens = SimpleNamespace(eos_id=None)
    with rejects("path", "runs/a", "no_end", ConfigError):
        forge.eot_token_id.fget(one)
    one._agreement = SimpleNamespace(exchange=lambda digest: [digest, digest, "other"])
    with rejects("requests", ..., "mismatch", ConfigError, where="[2]"):
        forge._require_same_requests(one, [1])
    with rejects("tp", 2, "unsupported", ConfigError):
        forge.generate_until(one, [])
    with rejects("max_gen_toks", 8, "range", ConfigError):
        forge._text(one, "x", {"max_gen_toks": 8})
    one._model = lambda tokens, document_ids: torch.zeros(1, 1, 8)
    with rejects("sequence_parallel", True, "unsupported", ConfigError):
        list(forge._score(one, [([1, 2], [3, 4])]))


def test_F203_a_continuation_is_scored_in_full_or_rejected(harnesses: tuple[Any, Any]) -> None:
    """The score of a bigram model is a sum over the pairs of neighbors."""
    logits = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
    chances = logits.log_softmax(-1).tolist()
    asked: Any = object.__new__(harnesses[0])
    asked.path, asked.batch_size, asked.max_length = "runs/a", 2, 8
    asked._meshes, asked._parallel = Meshes(torch.device("cpu")), ParallelConfig()
    asked._agreement = SimpleNamespace(exchange=lambda found: [found])
    asked._model = lambda tokens, document_ids: logits[tokens]

    def score(context: list[int], ids: list[int]) -> float:
        found = asked._loglikelihood_tokens([(None, [1], [2]), (None, context, ids)])
        return float(found[1][0])

    for context, ids in [[1, 2, 3], [4, 5]], [[1] * 20, [4, 5]], [[1, 2, 3], [5, 6] * 4]:
        pairs = zip([context[-1], *ids], ids)
        assert score(context, ids) == pytest.approx(sum(chances[a][b] for a, b in pairs), abs=1e-5)
    with rejects("requests", 9, "length", ConfigError):
        score([1, 2, 3], [5] * 9)
    with rejects("requests", [], "empty", ConfigError):
        score([], [5, 6])


def test_F144_each_end_of_the_tokenizer_ends_a_text_of_lm_eval(
    harnesses: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row ends at the first of its ends, and is written until those of all ranks have one."""
    forge, written = harnesses[0], []
    asked: Any = SimpleNamespace(
        _model=None, _agreement=SimpleNamespace(exchange=lambda done: [done])
    )
    asked._tokens = SimpleNamespace(end_ids=(3, 7), decode=lambda ids: " ".join(map(str, ids)))
    text = SimpleNamespace(prompt=[1], num_new=6, temperature=0.0, until=())

    def stream(*_: Any) -> Any:
        for token in row:
            written.append(token)
            yield torch.tensor([token])

    monkeypatch.setitem(forge._continue.__globals__, "generate_stream", stream)
    for row, shown in ([5, 7, 3, 5], "5"), ([3, 5], ""), ([5, 6], "5 6"):
        written.clear()
        assert forge._continue(asked, text) == shown
        assert len(written) == min(len(row), len(shown.split()) + 1)

"""What imports, exports, reports and harnesses reject, without a run and without a model of other packages."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from forge_core.lora import LoRAConfig
from forge_parallel import Meshes, ParallelConfig
from forge_testing.problems import ANY, assert_problem, rejects
from forge_train import ConfigError, DataError, JobError, StateError, plan
from forge_train.config.lora import LoRASection
from forge_train.config.schema import BuiltInModelConfig
from forge_train.hf import (
    adapters,
    check_inputs,
    compare,
    exporting,
    families,
    folder,
    importing,
    prompts,
)
from forge_train.metrics.tracking import WandbSink
from forge_train.report import activation_files, extract, text
from forge_train.report.evaluate import checked_job
from forge_train.trainer.run_directory import RunDirectory

pytestmark = pytest.mark.lane("test")

TINY: dict[str, Any] = {
    "vocab_size": 8,
    "dim": 8,
    "num_layers": 1,
    "num_heads": 2,
    "max_seq_len": 8,
}


def write(path: Path, table: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))
    return path


def test_adapters_that_cannot_leave_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: Any = SimpleNamespace(layers=["a", "b"])
    with rejects("--adapter", ["a", "b"], "fused"):
        adapters.peft_files(tensors, [], LoRASection(rank=2).adapters, None, str)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def saved(path: Path) -> Any:
        yield SimpleNamespace(read_object=lambda name: {"digest": "one"}, digest="other")

    monkeypatch.setattr(adapters, "SavedTensors", saved)
    with rejects("", "runs/a/base", "base"):
        adapters.MergedTensors(tmp_path, Path("runs/a/base"), 1.0)
    run = RunDirectory(tmp_path)
    with rejects("--adapter", ..., "whole", ConfigError, where="['norm.*']"):
        exporting._refuse_adapter(LoRASection(rank=2, whole=("norm.*",)), check=False)
    with rejects("--check", ..., "excludes", ConfigError):
        exporting._refuse_adapter(None, check=True)
    with rejects("--adapter", ..., "requires", ConfigError):
        exporting._export_adapter(run, tmp_path, tmp_path, None, None, None, torch.float32, {})  # type: ignore[arg-type]
    monkeypatch.setattr(families, "VLMModelConfig", SimpleNamespace)
    with rejects("--family", "chameleon", "adapter"):
        families.modules_of(SimpleNamespace(), "chameleon")  # type: ignore[arg-type]


def test_F210_an_adapter_names_the_revision_of_its_base() -> None:
    """`adapter_config.json` named a folder of the hub's cache, which another machine does not have."""
    tensors: Any = SimpleNamespace(layers=["q"])
    commit = "0123456789abcdef" * 2 + "01234567"
    cached = f"/home/a/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/{commit}"
    for base, name, revision in (
        (cached, "Qwen/Qwen3-0.6B", commit),
        ("/data/Qwen3-0.6B", "/data/Qwen3-0.6B", None),
        (None, None, None),
    ):
        files, _ = adapters.peft_files(tensors, [("q.weight", "q.weight", ())], LoRAConfig(rank=2), base, str)  # fmt: skip
        settings = json.loads(files["adapter_config.json"])
        assert (settings["base_model_name_or_path"], settings["revision"]) == (name, revision)


def test_checkpoints_that_cannot_be_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tmp_path / "checkpoints/step-00000002"
    with rejects("--step", 2, "excludes", ConfigError):
        exporting._find(step, 2)
    with rejects("source", str(step), "damaged", ConfigError):
        exporting._find(step, None)
    with rejects("source", str(tmp_path), "not_found", ConfigError):
        exporting._find(tmp_path, None)

    @contextlib.contextmanager
    def store(path: Path, read_only: bool) -> Any:
        yield SimpleNamespace(steps=lambda: [2, 4])

    monkeypatch.setattr(exporting, "Store", store)
    write(step / "manifest.json", {})
    with rejects("--step", 3, "unknown", ConfigError, where="[2, 4]"):
        exporting._find(tmp_path, 3)
    run = RunDirectory(tmp_path)
    with rejects("source", str(tmp_path), "model", ConfigError):
        exporting._sections(run)
    run.config.write_text('[model]\nname = "forge_testing.models:bigram"\n')
    with rejects("model.name", "forge_testing.models:bigram", "unsupported", ConfigError):
        exporting._sections(run)
    run.config.write_text("[model]\nvocab_size = 8\ndim = 0\n")
    with rejects("model.dim", 0, "range", ConfigError, where=run.config):
        exporting._sections(run)
    with rejects("--family", "chameleon", "requires"):
        exporting._rows_beside(run, ["a.*"], "chameleon")


def test_models_that_no_family_holds() -> None:
    section = BuiltInModelConfig(**TINY)
    assert families.find_family(section, None) == "llama"
    with rejects("--family", "nope", "unknown"):
        families.find_family(section, "nope")
    with rejects("model.moe.num_experts", 0, "family", where="mixtral"):
        families.find_family(section, "mixtral")
    with rejects("model.moe.num_experts", 0, "family", where="mixtral"):
        families.section_to_hf(section, "mixtral")
    with rejects("model", ..., "no_family") as caught:
        families.find_family(
            BuiltInModelConfig(**TINY, mixer="forge_testing.parts:RunningMean"), None
        )
    assert len({p.origin for p in caught.value.problems[1:]}) == 1
    images: Any = SimpleNamespace(moe=SimpleNamespace(num_experts=4))
    _, (problem,) = families._write_vlm(images, images, "llava")
    error = exporting.ConfigError([problem])
    assert_problem(error, "model.moe.num_experts", 4, "images")
    layers: Any = SimpleNamespace(num_layers=6)
    with rejects("mlp_only_layers", [0, 2, 3], "pattern"):
        families._moe_section(layers, (0, 2, 3), layers)


def test_folders_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = write(tmp_path / "forge.json", {"format": 2})
    with rejects("", ..., "version", where=sidecar):
        folder._sidecar(sidecar)
    monkeypatch.setattr(folder, "_MAX_BYTES", 1)
    large = write(tmp_path / "config.json", {})
    with rejects("", ..., "size", ConfigError, where=large):
        folder.files_in(tmp_path, ["*.json"])

    def full(*_: Any) -> None:
        raise OSError(28, "full")

    tensors: Any = SimpleNamespace(problems=lambda state: [], meta={})
    model = SimpleNamespace(
        section=SimpleNamespace(vocab_size=9),
        family="llama",
        tensors=lambda: tensors,
        files=dict,
        write=full,
    )
    monkeypatch.setattr(importing, "read_model", lambda *_: model)
    monkeypatch.setattr(importing, "build_model", lambda section, seed: nn.Module())
    monkeypatch.setattr(importing, "store_hf", lambda *_, **__: None)
    with rejects("run.dir", str(tmp_path / "run"), "write", JobError):
        importing.import_folder(tmp_path, tmp_path / "run", check=False)
    (tmp_path / "run/config.toml").touch()
    with rejects("run.dir", str(tmp_path / "run"), "exists", ConfigError):
        importing.import_folder(tmp_path, tmp_path / "run", check=False)


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


def test_copies_that_cannot_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = BuiltInModelConfig(**TINY)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with rejects("--check", ..., "requires", ConfigError):
        compare.compare(section, [], tmp_path)

    class Theirs:
        config = SimpleNamespace(model_type="llama")

        def eval(self) -> Theirs:
            return self

        def __call__(self, tokens: torch.Tensor) -> Any:
            return SimpleNamespace(logits=torch.full((*tokens.shape, 8), 1e6))

    def load(path: Path, dtype: Any) -> Theirs:
        if path != tmp_path:
            raise OSError("no config.json")
        return Theirs()

    fake: Any = ModuleType("transformers")
    fake.utils = SimpleNamespace(logging=SimpleNamespace(disable_progress_bar=lambda: None))
    fake.AutoModelForCausalLM = SimpleNamespace(from_pretrained=load)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    with rejects("--check", "none", "unsupported", ConfigError):
        compare.compare(section, [], Path("none"))
    with rejects("difference", ANY, "range", JobError, where=tmp_path):
        compare.compare(section, [], tmp_path)
    images = torch.zeros(1, 3, 2, 2)
    vision = type(
        "Vision",
        (),
        {"extra_inputs": ("images",), "dummy": lambda self, device: {"images": images}},
    )
    vision.__call__ = lambda self, images: images  # type: ignore[assignment]
    model: Any = SimpleNamespace(vision=vision(), adapter=lambda features: torch.zeros(1, 8, 4))
    monkeypatch.setattr(check_inputs, "VLMModelConfig", SimpleNamespace)
    places = {"image": SimpleNamespace(first_id=0)}
    short: Any = SimpleNamespace(placeholders=places, vocab_size=8, max_seq_len=8)
    with rejects("--check", ..., "length", ConfigError):
        check_inputs.inputs_of(model, short, Theirs())


def test_F137_an_import_compares_unless_it_cannot_or_shall_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--check` was an option that had to be known."""
    tensors: Any = SimpleNamespace(problems=lambda state: [], meta={}, ignored=[])
    section = BuiltInModelConfig(**TINY)
    model = SimpleNamespace(
        section=section, family="llama", tensors=lambda: tensors, files=dict, write=lambda *_: None
    )
    model.untied = False
    monkeypatch.setattr(importing, "read_model", lambda *_: model)
    monkeypatch.setattr(importing, "store_hf", lambda *_, **__: None)
    compared: list[Path] = []
    monkeypatch.setattr(importing, "compare", lambda *given: compared.append(given[2]))

    importing.import_folder(tmp_path, tmp_path / "a")
    importing.import_folder(tmp_path, tmp_path / "b", check=False)
    assert compared == [tmp_path]
    monkeypatch.setattr(compare, "_free_memory", lambda: 1e3)
    importing.import_folder(tmp_path, tmp_path / "c")
    assert "0.0 GB" in capsys.readouterr().out  # free
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    importing.import_folder(tmp_path, tmp_path / "d")
    assert "transformers" in capsys.readouterr().out
    assert compared == [tmp_path]


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
    monkeypatch.setattr(extract, "VLMModelConfig", SimpleNamespace)
    job = SimpleNamespace(model=SimpleNamespace())
    monkeypatch.setattr(extract, "checked_job", lambda *_: job)
    request = extract._Asked(Path("runs/a"), ("x",), tmp_path / "x.npz", 1, 1, "validation", None, "fp32", 1)  # fmt: skip
    with rejects("run", "runs/a", "images", ConfigError):
        extract._job(request, None, None)  # type: ignore[arg-type]
    with rejects("--rows", 0, "range", ConfigError):
        checked_job("runs/a", None, 0, ParallelConfig(), None)  # type: ignore[arg-type]
    with rejects("--rows", 0, "range"):
        next(text.continue_all(None, None, [], None, 1, None, 0))  # type: ignore[arg-type]


def test_machines_that_cannot_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    job: Any = SimpleNamespace(parallel=ParallelConfig(), train=SimpleNamespace(micro_batch=1))
    candidate = SimpleNamespace(config=job.parallel)
    large = SimpleNamespace(candidate=candidate, fits=False, peak=9e9, to_dict=dict)
    space = SimpleNamespace(hardware=SimpleNamespace(limit=8e9, name="h100"))
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_estimated", lambda config, flags: (large, space, []))
        patch.setattr(plan, "search", lambda space: [])
        patch.setattr(plan, "replace", lambda *_, **__: None)
        patch.setattr(plan, "_what_fits", lambda *_: "more GPUs")
        patch.setattr(plan, "describe", lambda candidate: "dp_shard 8")
        with rejects("parallel", "dp_shard 8", "memory", ConfigError, where="9 GB"):
            plan.show_plan(job, plan.PlanFlags(gpus=8, json=True))
    with rejects("--gpus", 0, "range", ConfigError):
        plan._machine(job, plan.PlanFlags(gpus=0))
    with rejects("--nodes", 3, "divides", ConfigError):
        plan._machine(job, plan.PlanFlags(gpus=8, nodes=3))
    with rejects("--gpu", "h999", "unknown", ConfigError):
        plan._machine(job, plan.PlanFlags(gpus=8, gpu="h999"))


def test_a_tracker_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = ModuleType("wandb")
    wandb.login = lambda prompt: False
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", "online")
    with rejects("mode", "online", "requires"):
        WandbSink(tmp_path, 0)


@pytest.fixture
def harnesses(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """forge_train.lm_harness and forge_train.lmms, over stand-ins for packages that need environments of their own."""

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
        monkeypatch.delitem(sys.modules, f"forge_train.{name}", raising=False)
    from forge_train import lm_harness, lmms

    for name in ("lm_harness", "lmms"):  # not for other tests: monkeypatch would put them back
        del sys.modules[f"forge_train.{name}"]
        delattr(sys.modules["forge_train"], name)
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
        forge._refuse_other_requests(one, [1])
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

"""`forge-train import` and `export`: models of transformers in, trained in any layout, and out again.

Logits: max|a - b| / max|b|, fp32, bound 1e-5. Scores of a router are spread wide, so that rounding chooses no
other expert.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from forge_ckpt import Store, read_tensors
from forge_ckpt.hf import BOUND, HFFolder, find_family
from forge_data import Loader
from forge_data.prepare import prepare
from forge_testing.extensions import smoothed
from forge_testing.jobs import TINY_JOB
from forge_testing.problems import ANY, assert_problem, rejects
from forge_testing.processes import forge_train
from forge_testing.runs import fit_on_ranks
from forge_train import ConfigError, Trainer, load_job, load_trained, read_run
from forge_train.build.build import build_model
from forge_train.build.hf_models import read_model, section_of
from forge_train.errors import JobError
from forge_train.hf.exporting import export_run
from forge_train.hf.importing import check_logits, import_folder

VOCAB = 320
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
QWEN = {**EXPERTS, "moe_intermediate_size": 24}
CASES: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "Mistral": {"sliding_window": 9, "tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Olmo2": {},
    "Gemma3Text": {
        **{"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 9},
        **{"layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 9.0},
    },
    "Granite": {
        **{"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
        "attention_multiplier": 0.2,
    },
    "Phi3": {"sliding_window": 9, "partial_rotary_factor": 0.5},
    "SmolLM3": {"no_rope_layers": [1, 0], "attention_bias": True},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {**QWEN, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
    "Qwen3Moe": {**QWEN, "head_dim": 16, "norm_topk_prob": True},
    "Olmoe": EXPERTS,
    "Glm4Moe": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"n_shared_experts": 1, "head_dim": 16, "use_qk_norm": True},
    },
    "GptOss": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 6, "sliding_window": 5},
        "swiglu_limit": 0.5,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "truncate": False},
            "original_max_position_embeddings": 32,
        },
    },
    "DeepseekV3": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        **{"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "v_head_dim": 6},
        **{"qk_nope_head_dim": 6, "qk_rope_head_dim": 4},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 1.0},
            **{"mscale_all_dim": 0.5, "original_max_position_embeddings": 32},
        },
    },
}
FILES = {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "chat_template.jinja": "{{ x }}"}


def config_of(kind: str, **options: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**{**SHAPE, **CASES[kind], **options})


def save(kind: str, folder: Path, **options: Any) -> Any:
    """A tiny random model of transformers, saved in shards, with files of a tokenizer beside."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **options)).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in name or "embed_scale" in name:  # these follow from the config
                continue
            noise = torch.randn_like(tensor)
            if tensor.dim() < 2:
                tensor.add_(noise * 0.1)
            else:
                tensor.copy_(noise if "gate.weight" in name else noise * 0.15)
    model.save_pretrained(folder, max_shard_size="40KB")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return model


def write_job(folder: Path, extra: str = "") -> Path:
    """A tiny job without a model of its own: that of the import in folder/run."""
    before, _, after = TINY_JOB.partition("[model]")
    text = before + after.partition("num_heads = 2\n")[2] + extra
    path = folder / "job.toml"
    path.write_text(
        text.format(run_dir=folder / "run").replace("lr = 1e-2", "lr = 1e-3\neps = 1e-4")
    )
    return path


def train(folder: Path, steps: int = 5, **overrides: Any) -> Any:
    overrides = {
        "train.steps": steps,
        "metrics.console": "off",
        "sample.max_new_tokens": 0,
        **overrides,
    }
    trainer = Trainer(load_job(write_job(folder), overrides))
    assert trainer.fit().step == steps
    return trainer


def their_logits(folder: Path, tokens: Tensor) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(tokens).logits


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


def checked(said: str) -> float:
    """The relative difference of logits in the last line that `check` prints."""
    *_, line = [line for line in said.splitlines() if line.startswith("check:")]
    return float(re.findall(r"\d\.\d\de[-+]\d\d", line)[1])


TOKENS = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("kind", CASES)
def test_F57_F58_imported_weights_train_and_go_back(
    tmp_path: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first step's loss is that of the imported model; what is exported has the logits of what was trained."""
    theirs = save(kind, tmp_path / "hf")
    assert import_folder(tmp_path / "hf", run_dir=tmp_path / "run", check=True) == 0
    assert checked(capsys.readouterr().out) <= BOUND
    seen: list[float] = []

    def watched(loader: Loader) -> Any:
        batch = unwatched(loader)
        if not seen:
            with torch.no_grad():
                logits = theirs(batch.tokens).logits.flatten(0, 1).float()
            seen.append(float(torch.nn.functional.cross_entropy(logits, batch.labels.flatten())))
        return batch

    unwatched = Loader.__next__
    monkeypatch.setattr(Loader, "__next__", watched)
    overrides = {"train.steps": 5, "metrics.console": "off", "sample.max_new_tokens": 0}
    trainer = Trainer(load_job(write_job(tmp_path), overrides))
    assert trainer.fit().step == 5
    assert read_run(tmp_path / "run").metrics["loss"][0] == pytest.approx(seen[0], rel=1e-5)

    assert export_run(tmp_path / "run", tmp_path / "out", check=True) == 0
    assert checked(capsys.readouterr().out) <= BOUND
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(wanted) is type(theirs)
    model, _, step = load_trained(tmp_path / "run")
    with torch.no_grad():
        assert error(model(TOKENS), their_logits(tmp_path / "out", TOKENS)) < 1e-5
        assert error(model(TOKENS), theirs(TOKENS).logits) > 1e-3  # five steps went by
    assert step == 5
    assert {n: (tmp_path / "out" / n).read_text() for n in FILES} == FILES
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["dtype"]) == (2, "float32")
    assert (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.parametrize("kind", ["Qwen2", "Glm4Moe"])
def test_an_import_that_nothing_trained_goes_back_bit_equal(tmp_path: Path, kind: str) -> None:
    save(kind, tmp_path / "hf")
    import_folder(tmp_path / "hf", run_dir=tmp_path / "run")
    export_run(tmp_path / "run" / "checkpoints" / "step-00000000", tmp_path / "out")
    ours, theirs = HFFolder(tmp_path / "out"), HFFolder(tmp_path / "hf")
    assert ours.entries.keys() == theirs.entries.keys()
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.entries)
    configs = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("out", "hf")]
    kind_of = getattr(transformers, f"{kind}Config")
    again = [kind_of(**config).to_dict() for config in configs]
    assert {key: again[0][key] for key in again[1]} == again[1]


@pytest.mark.lane("test")
def test_bf16_is_cast_from_the_fp32_weights_and_a_bias_of_selection_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("Glm4Moe", tmp_path / "hf")
    import_folder(tmp_path / "hf", run_dir=tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", dtype="bf16", check=True)
    assert checked(capsys.readouterr().out) <= BOUND
    ours, theirs = HFFolder(tmp_path / "out"), HFFolder(tmp_path / "hf")
    for name in theirs.entries:
        wanted = theirs.read(name)
        kept = "e_score_correction_bias" in name
        assert torch.equal(ours.read(name), wanted if kept else wanted.bfloat16()), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


LAYOUTS = {
    "pp2-ep2": ("Qwen3Moe", {"parallel__pp": 2, "parallel__ep": 2}),
    "tp2-dp2": ("Qwen3", {"parallel__tp": 2}),
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_export_equals_that_of_one_process_byte_for_byte(tmp_path: Path, layout: str) -> None:
    """Four ranks train and save. One process takes the weights and saves them as it does. Both are exported."""
    kind, axes = LAYOUTS[layout]
    save(kind, tmp_path / "hf")
    import_folder(tmp_path / "hf", run_dir=tmp_path / "run")
    job = write_job(tmp_path)
    fitted = fit_on_ranks(4, job, train__steps=3, sample__max_new_tokens=0, **axes)
    assert [f.code for f in fitted] == [0] * 4, fitted[0].problems
    step = tmp_path / "run" / "checkpoints" / "step-00000003"
    assert len(list(step.glob("data-*.bin"))) == 4
    export_run(tmp_path / "run", tmp_path / "many")

    alone = tmp_path / "alone"
    alone.mkdir()
    state = {name.removeprefix("model."): t for name, t in read_tensors(step, ["model.*"])}
    model = build_model(load_job(job).config.model, 0).to_empty(device="cpu")
    model.load_state_dict(state)  # one process, whole tensors, its own order of names
    with Store(alone / "checkpoints") as store:
        store.save(3, {"model": model})
    (alone / "config.toml").write_bytes((tmp_path / "run" / "config.toml").read_bytes())
    os.symlink(tmp_path / "run" / "hf", alone / "hf")
    export_run(alone, tmp_path / "one")
    files = {f: sorted((tmp_path / f).iterdir()) for f in ("many", "one")}
    assert [p.name for p in files["many"]] == [p.name for p in files["one"]]
    for ours, theirs in zip(*files.values(), strict=True):
        assert ours.read_bytes() == theirs.read_bytes(), ours.name


@pytest.mark.slow
@pytest.mark.distributed
def test_F57_an_import_trains_alike_in_other_layouts(tmp_path: Path) -> None:
    """Losses on tp2 x dp2, from the same imported weights, are those of one process."""
    losses = []
    for world in (1, 4):
        folder = tmp_path / str(world)
        folder.mkdir()
        save("Llama", folder / "hf")
        import_folder(folder / "hf", run_dir=folder / "run")
        axes = {"parallel__tp": 2} if world == 4 else {}
        fitted = fit_on_ranks(
            world, write_job(folder), train__steps=4, sample__max_new_tokens=0, **axes
        )  # fmt: skip
        assert [f.code for f in fitted] == [0] * world, fitted[0].problems
        losses.append(read_run(folder / "run").metrics["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_run_from_an_import_resumes_and_keeps_its_sidecar(tmp_path: Path) -> None:
    save("Mixtral", tmp_path / "hf")
    import_folder(tmp_path / "hf", run_dir=tmp_path / "run")
    given = {"model.moe.capacity_factor": 1.5, "model.moe.aux_loss_weight": 0.01}
    train(tmp_path, 2, **given)
    trainer = train(tmp_path, 4, **given)
    assert [
        e["event"] for e in read_run(tmp_path / "run").events if e["event"] in ("start", "resume")
    ] == ["start", "resume"]
    assert trainer.config.model.moe.capacity_factor == 1.5
    export_run(tmp_path / "run", tmp_path / "out", step=4)
    sidecar = json.loads((tmp_path / "out" / "forge.json").read_text())
    assert sidecar == {
        "format": 1,
        "step": 4,
        "model": {"moe.aux_loss_weight": 0.01, "moe.capacity_factor": 1.5},
    }
    import_folder(tmp_path / "out", run_dir=tmp_path / "again" / "run")
    job = load_job(write_job(tmp_path / "again"), {"train.steps": 1})
    assert job.config.model == trainer.config.model


def test_a_rollback_never_goes_back_to_an_import(tmp_path: Path) -> None:
    """It has weights alone. The bad batch and two before it are left out from step 3 on, the first of the run's own."""
    save("Mixtral", tmp_path / "hf")
    import_folder(tmp_path / "hf", run_dir=tmp_path / "run")
    back = {"action": "rollback", "max_in_a_row": 0}
    train(
        tmp_path,
        6,
        **{f"resilience.nonfinite.{key}": value for key, value in back.items()},
        **{"checkpoint.every_steps": 3, "resilience.rollback.batches_before": 2},
        **{"train.objective": f"{__name__}:bad_in_step_4"},
    )
    (event,) = [e for e in read_run(tmp_path / "run").events if e["event"] == "rollback"]
    assert (event["to_step"], event["bad_steps"]) == (3, [4, 4])


def bad_in_step_4(model: Any, batch: Any) -> dict[str, Tensor]:
    bad = (batch.instance_ids == 12).any()
    return {"loss": smoothed(model, batch)["loss"] * torch.where(bad, torch.inf, 1.0)}


@pytest.mark.lane("test")
def test_the_model_of_a_job_is_that_of_the_import(tmp_path: Path) -> None:
    save("Qwen3", tmp_path / "hf")
    import_folder(tmp_path / "hf", run_dir=tmp_path / "run")
    job = write_job(tmp_path)
    found = load_job(job).config.model
    assert (found.dim, found.qk_norm, found.head_dim, found.vocab_size) == (32, True, 16, VOCAB)
    equal = {"model.dim": 32, "model.qk_norm": True, "model.max_seq_len": 48}
    assert load_job(job, equal).config.model.max_seq_len == 48
    assert load_job(job).origin("model.dim") == f"import {tmp_path / 'run' / 'model.toml'}"
    with rejects("model.dim", 64, "weights", ConfigError) as caught:
        load_job(job, {"model.dim": 64, "model.rope_scaling.factor": 2.0})
    assert_problem(caught.value, "model.rope_scaling", {"factor": 2.0}, "weights")
    for problem, wanted in zip(caught.value.problems, ("32", "'none'"), strict=True):
        assert f"{wanted}," in problem.rule
    with rejects("model.name", "my_lab:build", "weights", ConfigError) as caught:
        load_job(job, {"model.name": "my_lab:build"})
    (problem,) = caught.value.problems
    assert "'transformer'," in problem.rule


@pytest.mark.slow
def test_a_damaged_import_never_starts_over_silently(tmp_path: Path) -> None:
    save("Qwen2", tmp_path / "hf")
    import_folder(tmp_path / "hf", run_dir=tmp_path / "run")
    data = tmp_path / "run" / "checkpoints" / "step-00000000" / "data-0.bin"
    content = bytearray(data.read_bytes())
    content[1000] ^= 1
    data.write_bytes(content)
    for _ in range(2):
        outcome = forge_train("run", write_job(tmp_path), "--train.steps", "2")
        assert outcome.code == 66, outcome.err
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    outcome = forge_train("run", write_job(tmp_path), "--train.steps", "2")
    assert outcome.code == 66
    assert f"{tmp_path}/run/checkpoints" in outcome.err
    assert "model.toml" in outcome.err


@pytest.mark.lane("test")
@pytest.mark.parametrize(
    ("package", "name", "kind"),
    [("forge-ckpt", "Qwen3-0.6B", "Qwen3"), ("forge-moe", "Mixtral-8x7B", "Mixtral")],
)
def test_examples_of_the_references_load_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str, kind: str
) -> None:
    readme = Path(__file__).parents[2] / "docs/internals" / f"{package}.md"
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    (code,) = [textwrap.dedent(block) for block in blocks if name in block]
    theirs = save(kind, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, str(readme), "exec"), names)
    with torch.no_grad():
        got = names["model"].eval()(TOKENS)
        assert error(got, theirs(TOKENS).logits) < 1e-5
    if package == "forge-ckpt":
        ours = HFFolder(tmp_path / "out")
        assert ours.entries.keys() == HFFolder(tmp_path / name).entries.keys()


# ---- command line and refusals


@pytest.mark.slow
def test_the_verbs_on_the_command_line(tmp_path: Path) -> None:
    save("Llama", tmp_path / "hf")
    outcome = forge_train("import", tmp_path / "hf", "--run.dir", tmp_path / "run", "--check")
    assert outcome.code == 0, outcome.err
    assert "imported 21 tensors of llama" in outcome.out
    outcome = forge_train("run", write_job(tmp_path), "--train.steps", "1")
    assert outcome.code == 0, outcome.err
    outcome = forge_train(
        "export", tmp_path / "run", tmp_path / "out", "--dtype", "bf16", "--step", "1"
    )
    assert outcome.code == 0, outcome.err
    assert "step-00000001 to" in outcome.out
    outcome = forge_train("export", tmp_path / "run", tmp_path / "out")
    assert outcome.code == 78
    assert f"{tmp_path / 'out'}" in outcome.err


def change(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


IMPORTS: dict[str, tuple[str, dict[str, Any], str, Any, str]] = {
    "another family": ("Llama", {"model_type": "gpt2"}, "model_type", "gpt2", "unknown"),
    "F98: Llama": (
        *("Llama", {"embedding_multiplier": 12.0}),
        *("embedding_multiplier", 12.0, "unknown_key"),
    ),
    "F98: Mixtral": ("Mixtral", {"clip_qkv": 8.0}, "clip_qkv", 8.0, "unknown_key"),
    "F98: Qwen3Moe": ("Qwen3Moe", {"swiglu_limit": 7.0}, "swiglu_limit", 7.0, "unknown_key"),
    "layers without a pattern": (
        *("Qwen3Moe", {"num_hidden_layers": 5, "mlp_only_layers": [1, 4]}),
        *("mlp_only_layers", [0, 2, 3], "pattern"),
    ),
    "another shape": (
        *("Llama", {"intermediate_size": 44}),
        *("layers.0.feed_forward.gate_proj.weight", (44, 32), "shape"),
    ),
    "fewer layers": (
        *("Llama", {"num_hidden_layers": 1}),
        *("layers.1.mixer_norm.weight", ..., "file_only"),
    ),
    "more layers": (
        *("Llama", {"num_hidden_layers": 3}),
        *("layers.2.mixer_norm.weight", ..., "model_only"),
    ),
}


@pytest.mark.parametrize("case", IMPORTS)
def test_an_import_that_cannot_be_held_is_rejected_by_name(tmp_path: Path, case: str) -> None:
    kind, keys, key, value, code = IMPORTS[case]
    save(kind, tmp_path / "hf")
    change(tmp_path / "hf", **keys)
    with rejects(key, value, code, ConfigError):
        import_folder(tmp_path / "hf", run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.lane("test")
@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_F139_a_head_of_its_own_is_not_tied(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was dropped where config.json ties; transformers 5 keeps a head that differs. An equal one is dropped."""
    theirs = save(kind, tmp_path / "hf")
    change(tmp_path / "hf", tie_word_embeddings=True)
    assert import_folder(tmp_path / "hf", run_dir=tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert checked(said) < 1e-5
    assert "not tied" in said
    assert not read_model(tmp_path / "hf").section.tie_embeddings
    export_run(tmp_path / "run", tmp_path / "out")
    assert not json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"]
    assert error(their_logits(tmp_path / "out", TOKENS), theirs(TOKENS).logits.detach()) < 1e-5

    with torch.no_grad():
        theirs.lm_head.weight.copy_(theirs.model.embed_tokens.weight)
    theirs.save_pretrained(tmp_path / "equal", max_shard_size="40KB")
    change(tmp_path / "equal", tie_word_embeddings=True)
    assert import_folder(tmp_path / "equal", run_dir=tmp_path / "tied") == 0
    assert "lm_head.weight" in capsys.readouterr().out
    assert read_model(tmp_path / "equal").section.tie_embeddings


@pytest.mark.lane("test")
@pytest.mark.parametrize("kind", ["Llama", "Qwen2Moe"])
def test_F170_folders_that_transformers_loads_are_imported(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = save(kind, tmp_path / "hf", tie_word_embeddings=True)
    index = tmp_path / "hf/model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["lm_head.weight"] = next(iter(table["weight_map"].values()))
    index.write_text(json.dumps(table))  # an exporter's entry of a tied head, without a tensor
    theirs.model.save_pretrained(tmp_path / "base")  # names without `model.`
    change(tmp_path / "base", architectures=["X"], auto_map={"AutoModel": "x.X"})
    for name in ("hf", "base"):
        assert import_folder(tmp_path / name, run_dir=tmp_path / f"run-{name}") == 0
        assert checked(capsys.readouterr().out) < 1e-5
    saved = [
        dict(read_tensors(tmp_path / f"run-{n}/checkpoints/step-00000000", ["model.*"]))
        for n in ("hf", "base")
    ]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][n], saved[1][n]) for n in saved[0])


@pytest.mark.lane("test")
def test_F170_what_acts_in_training_only_stops_a_training_run_only(tmp_path: Path) -> None:
    save("Mixtral", tmp_path / "hf")
    change(tmp_path / "hf", attention_dropout=0.1, router_jitter_noise=0.2)
    import_folder(tmp_path / "hf", run_dir=tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    assert read_model(tmp_path / "hf").section == read_model(tmp_path / "out").section
    job = write_job(tmp_path)
    other = {"init.from": str(tmp_path / "hf"), "run.dir": str(tmp_path / "other")}
    fork = {"init.from": str(tmp_path / "run"), "run.dir": str(tmp_path / "other")}
    for overrides in ({}, other, fork):
        with rejects("attention_dropout", 0.1, "training", ConfigError) as caught:
            load_job(job, overrides)
        assert_problem(caught.value, "router_jitter_noise", 0.2, "training")
    change(tmp_path / "run/hf", attention_dropout=0.0, router_jitter_noise=None)
    load_job(job)


@pytest.mark.lane("test")
def test_F210_weights_that_are_nan_are_not_imported(tmp_path: Path) -> None:
    theirs = save("Llama", tmp_path / "hf")
    with torch.no_grad():
        theirs.model.norm.weight[3] = float("nan")
    theirs.save_pretrained(tmp_path / "nan")
    for check, kind in ((True, ConfigError), (False, JobError)):
        with rejects("model.norm.weight", code="not_finite", kind=kind, where="model.safetensors"):
            import_folder(tmp_path / "nan", run_dir=tmp_path / "run", check=check)
    assert not list(tmp_path.glob("run/checkpoints/step-*/manifest.json"))


@pytest.mark.lane("test")
def test_a_run_is_never_written_over_and_other_folders_are_rejected(tmp_path: Path) -> None:
    save("Llama", tmp_path / "hf")
    import_folder(tmp_path / "hf", run_dir=tmp_path / "run")
    with rejects("run.dir", str(tmp_path / "run"), "exists", ConfigError):
        import_folder(tmp_path / "hf", run_dir=tmp_path / "run")
    (tmp_path / "hf" / "forge.json").write_text('{"format": 1, "model": {"dim": 3}}')
    with rejects("", ..., "version", ConfigError, where="forge.json"):
        import_folder(tmp_path / "hf", run_dir=tmp_path / "other")
    sidecar = {"format": 1, "model": {"moe.capacity_factor": "x"}}
    (tmp_path / "hf" / "forge.json").write_text(json.dumps(sidecar))
    with rejects("model.moe.capacity_factor", "x", "type", ConfigError, where="forge.json"):
        import_folder(tmp_path / "hf", run_dir=tmp_path / "other")
    with rejects("", ..., "unreadable", ConfigError, where=tmp_path / "nowhere/config.json"):
        import_folder(tmp_path / "nowhere", run_dir=tmp_path / "other")


EXPORTS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "a norm": ({"model.norm": "layer_norm"}, "model.norm", "layer_norm"),
    "GELU": ({"model.feed_forward": "gelu"}, "model.feed_forward", "gelu"),
    "a soft cap": ({"model.attention.softcap": 30.0}, "model.attention.softcap", 30.0),
    "a router": (
        {"model.moe.num_experts": 4, "model.moe.router": "expert_choice"},
        "model.moe.router",
        "expert_choice",
    ),
    "biased experts": (
        {"model.moe.num_experts": 4, "model.moe.bias": True},
        "model.moe.bias",
        True,
    ),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_an_option_without_a_key_is_rejected_by_name(tmp_path: Path, case: str) -> None:
    keys, key, value = EXPORTS[case]
    job = write_job(tmp_path)
    given = {"model.dim": 16, "model.num_layers": 1, "model.num_heads": 2, "train.steps": 1,
             "sample.max_new_tokens": 0, "eval.every_steps": 0, "metrics.console": "off"}  # fmt: skip
    Trainer(load_job(job, {**given, **keys})).fit()
    with rejects(key, value, kind=ConfigError):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_run_from_scratch_is_exported_as_the_first_family_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "model.dim": 16,
        "model.num_layers": 2,
        "model.num_heads": 2,
        "model.vocab_size": VOCAB,
    }
    for name, moe in {"llama": {}, "mixtral": {"model.moe.num_experts": 4}}.items():
        (tmp_path / name).mkdir()
        train(tmp_path / name, 2, **given, **moe)
        export_run(tmp_path / name / "run", tmp_path / name / "out", check=True)
        out = capsys.readouterr().out
        assert f"{name}, fp32" in out
        assert "bytes" in out
        assert checked(out) <= BOUND
    with rejects("model.qk_norm", False, kind=ConfigError, where="llama"):
        export_run(tmp_path / "llama" / "run", tmp_path / "q", family="qwen3")
    with rejects("--family", "gpt2", "unknown", ConfigError):
        export_run(tmp_path / "llama" / "run", tmp_path / "q", family="gpt2")


def test_F50_F58_the_tokenizer_of_the_data_goes_out_with_the_model(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    names = ["<|endoftext|>", "<unk>", "the", "cat", "sat", "on", "mat"]
    words = library.Tokenizer(
        library.models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>")
    )
    words.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(names[:2])
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "text.txt").write_text("the cat sat on mat\n" * 50)
    tokens = tmp_path / "tokens"
    prepare(tmp_path / "text.txt", tokens, tokenizer=str(tmp_path / "words.json"), document="line")
    given = {"model.dim": 16, "model.num_layers": 1, "model.num_heads": 2, "eval.every_steps": 0,
             "data.sources.text.name": "tokens", "data.sources.text.path": str(tokens)}  # fmt: skip
    train(tmp_path, 1, **given)
    export_run(tmp_path / "run", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("cat on mat") == [3, 5, 6]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (0, 0)


@pytest.mark.slow
def test_a_hostile_folder_is_one_line_on_the_command_line(tmp_path: Path) -> None:
    save("Llama", tmp_path / "hf")
    shard = next((tmp_path / "hf").glob("model-00002-*"))
    content = bytearray(shard.read_bytes())
    content[:8] = (2**62).to_bytes(8, "little")
    shard.write_bytes(content)
    for path, text, value in (
        (shard, None, f"{2**62} "),
        (tmp_path / "hf" / "config.json", "[" * 10**6, ""),
        (tmp_path / "hf" / "config.json", '{"a": 1, "a": 2}', "'a' "),
    ):
        if text is not None:
            path.write_text(text)
        outcome = forge_train("import", tmp_path / "hf", "--run.dir", tmp_path / "run")
        assert outcome.code == 78
        assert outcome.err.startswith(f"forge-train: {path}: {value}")
        assert len(outcome.err.splitlines()) == 1
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("source", "options", "code"),
    [
        ("nowhere", {}, "not_found"),
        ("run", {"step": 7}, "unknown"),
        ("run/checkpoints/step-00000000", {"step": 0}, "excludes"),
        ("run/checkpoints/step-00000009", {}, "damaged"),
    ],
)
def test_exports_of_nothing_are_rejected(
    tmp_path: Path, source: str, options: dict[str, Any], code: str
) -> None:
    save("Llama", tmp_path / "hf")
    import_folder(tmp_path / "hf", run_dir=tmp_path / "run")
    key = "--step" if options else "source"
    with rejects(key, options.get("step", str(tmp_path / source)), code, ConfigError):
        export_run(tmp_path / source, tmp_path / "out", **options)


@pytest.mark.lane("test")
def test_a_failed_check_is_reported(tmp_path: Path) -> None:
    save("Llama", tmp_path / "hf")
    found = read_model(tmp_path / "hf")
    model = found.build()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    with rejects("difference", ANY, "range", JobError, where=tmp_path / "hf"):
        check_logits(model, found)


WEIRD = (None, True, False, "x", "", -1, 0, 2.5, [], [1], [[1]], ["x"], {}, {"a": 1}, {"rope_type": []}, 10**30, float("nan"), float("inf"))  # fmt: skip


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("kind", CASES)
def test_F98_a_key_of_any_value_is_read_or_rejected(kind: str) -> None:
    """Every key of the family, and those of the others, with values that no file should have: a model, or lines."""
    hf = config_of(kind).to_dict()
    section_of(find_family(hf).configs_from_hf(hf))
    keys = {key for other in CASES for key in config_of(other).to_dict()}
    inner = [
        f"rope_parameters.{key}"
        for key in ("rope_type", "rope_theta", "factor", "partial_rotary_factor")
    ]
    for key in (*keys, *inner):
        for value in WEIRD:
            table, _, name = key.rpartition(".")
            changed = {**hf, table: {**hf[table], name: value}} if table else {**hf, key: value}
            found: Any = None
            try:
                found = section_of(find_family(changed).configs_from_hf(changed))
            except ValueError as error:
                found = str(error)
            assert found, (key, value)

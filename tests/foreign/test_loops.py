"""Thirteen loops of other code bases, each with some packages of Forge, and without the others."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forge_train import Trainer, load_job, read_run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLAIN = ["0 1", "2 3", "4 5", "6 7", "8 9"]  # ids of steps
#: Program -> the packages that it may import.
USES = {
    "accelerate_fsdp.py": "forge_core,forge_ckpt",
    "dcp_job.py": "forge_ckpt",
    "fabric_loop.py": "forge_data",
    "llama_ranks.py": "forge_parallel",
    "nanogpt_moe.py": "forge_moe",
    "router_alone.py": "forge_moe",
    "schedule_free_loop.py": "forge_core",
    "supervised_script.py": "forge_resilience",
    "titan_muon.py": "forge_core",
    "torch_workers_loop.py": "forge_data",
    "trainer_loop.py": "forge_ckpt,forge_data,forge_resilience",
    "vlm_answers.py": "forge_vlm,forge_core",
}


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{missing} not installed")


def start(program: str, *arguments: object, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "only.py", USES[program], program]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE, env={**os.environ, **environ},
    )  # fmt: skip


def ended(process: subprocess.Popen[str], code: int = 0) -> list[str]:
    out, err = process.communicate()
    assert process.returncode == code, err
    return out.splitlines()


def run(program: str, *arguments: object, code: int = 0) -> list[str]:
    return ended(start(program, *arguments), code)


def run_on_two_ranks(program: str, *arguments: object) -> list[str]:
    """The lines of rank 0 of two, started as by torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_RUN_ID": "0"}
    ranks = [start(program, *arguments, RANK=r, LOCAL_RANK=r, **environ) for r in "01"]
    try:
        lines, _ = map(ended, ranks)
        return lines
    finally:
        for rank in ranks:
            rank.kill()


def run_here(program: str, *arguments: object) -> dict[str, Any]:
    """The variables that a program leaves; the test's mark `uses` names the packages that it may import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, *map(str, arguments)])
        return runpy.run_path(str(HERE / program))


def test_the_loops_are_short() -> None:
    lines = {name: len((HERE / name).read_text().splitlines()) for name in USES}
    assert len(lines) == 12
    assert {name: n for name, n in lines.items() if n >= 40} == {}
    by_hand = (ROOT / "examples/train_by_hand.py").read_text()
    assert len(by_hand.splitlines()) <= 150
    assert "forge_train" not in by_hand


@pytest.mark.lane("test")
@pytest.mark.uses("forge_moe")
def test_other_packages_cannot_be_imported(tmp_path: Path) -> None:
    import forge_moe

    assert forge_moe.MoE is not None
    for name in ("forge_core", "forge_parallel", "forge_testing"):
        with pytest.raises(ModuleNotFoundError, match=name):
            __import__(name)
    (program := tmp_path / "program.py").write_text("import forge_moe, forge_core")
    command = [sys.executable, "only.py", "forge_moe", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert "ModuleNotFoundError: forge_core" in done.stderr


@pytest.mark.lane("test")
@pytest.mark.uses("forge_moe")
def test_nanogpt_with_a_moe_layer_learns_and_balances_its_load() -> None:
    torch.manual_seed(1337)
    found = run_here("nanogpt_moe.py")
    assert found["losses"][-1] < 0.3 * found["losses"][0]
    assert all(h.moe.router.expert_bias.abs().max() > 0.01 for h in found["model"]["h"])


@pytest.mark.lane("test")
@pytest.mark.uses("forge_moe")
def test_a_router_in_another_layer_is_a_softmax_over_the_two_best() -> None:
    found = run_here("router_alone.py")
    layer, x = found["layer"], found["x"]
    best, ids = (x @ layer.router.weight.T).topk(2)
    outputs = torch.stack([expert(x) for expert in layer.experts], dim=1)  # (T, E, D)
    chosen = outputs.gather(1, ids[..., None].expand(-1, -1, 8))
    torch.testing.assert_close(found["y"], (best.softmax(-1)[..., None] * chosen).sum(1))
    assert layer.router.weight.grad.abs().sum() > 0


@pytest.mark.lane("test")
@pytest.mark.uses("forge_core")
def test_schedule_free_adamw_with_a_loss_scaler() -> None:
    found = run_here("schedule_free_loop.py")
    scaler, optimizer, model = found["scaler"], found["optimizer"], found["model"]
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert scaler.get_scale() == 2.0**9
    assert {float(state["step"]) for state in optimizer.state.values()} == {39.0}

    # the average does not train, and half precision loses small steps: both are errors, not a worse loss
    optimizer.eval()
    scaler.scale(model(found["x"]).sum()).backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.train\(\)"):
        scaler.step(optimizer)
    with pytest.raises(ValueError, match=r"torch\.float16"):
        type(optimizer)(model.half().parameters(), lr=2e-2)


@pytest.mark.lane("test")
@pytest.mark.uses("forge_core")
def test_muon_in_a_loop_like_torchtitans_trains_sharded_as_in_one_process() -> None:
    alone = run_here("titan_muon.py")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = run_here("titan_muon.py")
    finally:
        dist.destroy_process_group()
    assert alone["losses"][-1] < 0.6 * alone["losses"][0]
    assert sharded["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    state = alone["state"]
    assert state.keys() == sharded["state"].keys()
    assert {"momentum_buffer"} == state["layers.0.0.weight"].keys()
    assert {"exp_avg", "exp_avg_sq", "step"} == state["tok_embeddings.weight"].keys()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.lane("ci")
@needs("accelerate")
def test_adamw_and_a_store_under_fsdp2_of_accelerate(tmp_path: Path) -> None:
    begins = run_on_two_ranks("accelerate_fsdp.py", tmp_path)  # whole, stopped, resumed, of torch
    assert begins == ["0", "0", "2", "0"]


@pytest.mark.slow
@pytest.mark.lane("ci")
@needs("transformers", "accelerate")
def test_a_trainer_of_transformers_stops_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def step(folder: str, stop_at: int, code: int = 0) -> str:
        lines = run("trainer_loop.py", tmp_path / folder, stop_at, code=code)
        return next(line for line in lines if line[:1].isdecimal())

    full = step("full", 0)
    assert full.startswith("6 ")
    assert step("stopped", 2, code=75).startswith("2 ")
    assert step("stopped", 0) == full


@pytest.mark.lane("ci")
@pytest.mark.parametrize(
    "program",
    ["torch_workers_loop.py", pytest.param("fabric_loop.py", marks=needs("lightning"))],
)
def test_two_workers_of_a_DataLoader_go_on_with_the_next_batch(
    program: str, tmp_path: Path
) -> None:
    full = run(program, tmp_path / "full", 5)
    assert [" ".join(line.split()[:2]) for line in full] == PLAIN
    assert run(program, tmp_path / "stopped", 3) + run(program, tmp_path / "stopped", 2) == full


@pytest.mark.lane("ci")
@pytest.mark.skipif(sys.platform != "linux", reason="the supervisor reads /proc")
def test_a_script_that_is_killed_is_started_again(tmp_path: Path) -> None:
    assert run("supervised_script.py", tmp_path) == ["0 2 0 1 2 3 "]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.lane("test")
@pytest.mark.uses("forge_ckpt")
def test_checkpoints_of_dcp_are_converted_and_resharded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forge_ckpt(*words: object) -> None:
        """The command, in this process."""
        monkeypatch.setattr(sys, "argv", ["forge-ckpt", *map(str, words)])
        with pytest.raises(SystemExit) as end:  # prose: it has no text
            runpy.run_module("forge_ckpt", run_name="__main__")
        assert not end.value.code, words

    saved, one, three, named, back = (tmp_path / n for n in ("step-3", "one", "three", "named", "back"))  # fmt: skip
    run_on_two_ranks("dcp_job.py", tmp_path / "nothing", saved)
    forge_ckpt("convert", saved, one)
    forge_ckpt("reshard", one, three, "--ranks", 3)
    forge_ckpt("verify", three)
    forge_ckpt("convert", saved, named, "--optimizer", "names")
    forge_ckpt("convert", named, back, "--to", "dcp")
    assert len(list((three / "step-00000003").glob("data-*.bin"))) == 3

    ends = [run_here("dcp_job.py", s, tmp_path / f"{s.name}-6") for s in (saved, three, back)]
    wanted, *others = (end["model"].state_dict() for end in ends)
    assert len(wanted) == 4
    for found in others:
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def write_llava(folder: Path) -> None:
    """A tiny random LLaVA with its processor and a tokenizer of bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    clip = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24}
    clip |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    text = transformers.LlamaConfig(**sizes, vocab_size=264, num_attention_heads=2)
    config = transformers.LlavaConfig(
        vision_config=clip, text_config=text.to_dict(), image_token_index=257
    )
    model = transformers.LlavaForConditionalGeneration(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["</s>", "<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = '{"height": 16, "width": 16}'
    pixels = f'{{"do_center_crop": true, "crop_size": {size}, "size": {{"shortest_edge": 16}}}}'
    (folder / "preprocessor_config.json").write_text(pixels)


@pytest.mark.lane("quick")
def test_a_script_that_generates_text_for_images(tmp_path: Path) -> None:
    write_llava(tmp_path / "llava")
    assert run("vlm_answers.py", tmp_path / "llava", tmp_path / "out")[-1] == "answers 2"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.lane("test")
@needs("transformers")
def test_a_llama_on_two_ranks_is_proved_and_trains(tmp_path: Path) -> None:
    assert run("llama_ranks.py")[-1] == "['green']"
    run_on_two_ranks("llama_ranks.py")


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_rows_of_a_loop_by_hand_are_those_of_the_runner_bit_by_bit(tmp_path: Path) -> None:
    for steps in (6, 12):
        script = map(
            str, (ROOT / "examples/train_by_hand.py", tmp_path / "by_hand", "--steps", steps)
        )
        subprocess.run([sys.executable, *script], check=True, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "by_hand/metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [6, 10, 12]

    flags = {"run.dir": str(tmp_path / "runner"), "metrics.every_steps": 1}
    config = ROOT / "apps/train/configs/debug.toml"
    Trainer(load_job(str(config), flags), until=12, saves=False, evaluates=False).fit()
    metrics = read_run(tmp_path / "runner").metrics
    for row in rows:
        at = metrics["step"].index(row["step"])
        assert {name: metrics[name][at] for name in row} == row

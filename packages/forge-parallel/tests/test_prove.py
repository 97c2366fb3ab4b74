"""`forge_parallel.prove`: right models are green, planted mistakes are red and named."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_parallel.grad_norm import clip_grads_
from forge_parallel.prove import ProveError, Result, processes, prove
from forge_parallel.prove.__main__ import main, run
from forge_parallel.prove.cells import Cell, layout_name
from forge_parallel.prove.prove import SAME_IN_ONE_RANK
from forge_parallel.prove.settings import CPU_BOUND, ONE_RANK, ONE_RANK_BOUND, Devices
from forge_parallel.prove.task import Task
from forge_parallel.prove.values import are_equal, compare_with_cpu, one_process
from forge_testing.problems import assert_problem, rejects

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]


@pytest.fixture(autouse=True)
def forks_that_can_run_a_backward() -> None:
    """A CUDA build cannot run one in a fork of a process that ran one, as other files' tests do: prove refuses."""
    if torch.version.cuda is None:
        return
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        pytest.skip("CUDA builds cannot fork after an earlier test: run this file by itself")


DIM, HEAD, VOCAB = 16, 4, 61
ROLES = {
    "embedding.*": "vocab",
    "layers.*.norm_*": "sequence",
    "*.[qkv]_proj.*": "colwise",
    "*.q_norm.*": "replicate_sum_grad",
    "*.o_proj.*": "rowwise",
    "*.up.*": "colwise",
    "*.down.*": "rowwise",
    "norm.*": "sequence",
    "head.*": "sharded_logits",
}


class Attention(nn.Module):
    """The key's bias has a gradient of zero: a softmax does not see what all keys share."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HEAD
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, DIM) for _ in range(3))
        self.q_norm, self.o_proj = nn.RMSNorm(HEAD), nn.Linear(DIM, DIM, bias=False)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        parts = (p(x).unflatten(-1, (-1, HEAD)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = parts
        return self.o_proj(self.attend(self.q_norm(q), k, v, None).flatten(-2))


def attend(q: Tensor, k: Tensor, v: Tensor, ctx: Any) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


attend.is_causal = True  # type: ignore[attr-defined]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.attention = nn.RMSNorm(DIM), nn.RMSNorm(DIM), Attention()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """A decoder without any position but the causal order."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = tokens if self.embedding is None else self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def pipeline_parts(self) -> dict[str, Any]:
        return {"first": ("embedding",), "blocks": "layers", "last": ("norm", "head")}

    def parallel_roles(self) -> dict[str, str]:
        return ROLES


def verdicts(results: list[Result]) -> dict[str, str]:
    return {result.cell: result.verdict for result in results}


class Wide(Model):
    """More ids than a small vocabulary has. `wrong`: a mistake of ranks with ids of its second half, as that of a role."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(320, DIM), nn.Linear(DIM, 320, bias=False)
        self.wrong = wrong

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        factor = 1 + 0.5 * (tokens >= 160) * (self.wrong and dist.is_initialized())
        return super().forward(tokens, positions) * factor[..., None]


def test_ids_of_the_full_vocabulary_are_drawn_without_its_size() -> None:
    options: dict[str, Any] = {"nproc": 2, "layouts": [{"dp_shard": 2}]}
    (right,) = prove(Wide, **options)
    assert right.verdict == "green", right
    (wrong,) = prove(lambda: Wide(wrong=True), **options)
    assert wrong.verdict == "red"
    (unseen,) = prove(lambda: Wide(wrong=True), vocab_size=160, **options)
    assert unseen.verdict == "green"


@pytest.mark.slow
def test_a_plain_model_is_green_in_every_layout() -> None:
    results = prove(Model, vocab_size=VOCAB, nproc=4)
    assert {r.verdict for r in results} == {"green"}, [r for r in results if r.verdict != "green"]
    assert [r.world for r in results] == [1] * 4 + [2] * 11 + [4] * 6
    assert all({"stream", "loss", "gradient", "norm", "weight"} == set(r.errors) for r in results)
    assert 0 < max(r.worst for r in results) < 1e-5


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize(("seq_len", "verdict"), [(12, "green"), (14, "refused")])
def test_rows_that_two_chunks_of_a_rank_allow_train_as_in_one_process(
    monkeypatch: pytest.MonkeyPatch, seq_len: int, verdict: str
) -> None:
    """12 tokens are six of a rank, in two chunks of three, and three of each of its tp ranks."""
    cells = [Cell("both", 4, {"cp": 2, "tp": 2})]
    monkeypatch.setattr(sys.modules["forge_parallel.prove.cells"], "CELLS", cells)
    (result,) = prove(Model, vocab_size=VOCAB, seq_len=seq_len, worlds=[4])
    assert result.verdict == verdict, result


@pytest.mark.lane("test")
def test_F223_builds_differ_where_one_has_nan_and_the_other_zero() -> None:
    """Uninitialized memory may be nan on both sides; nan for 0, and inf for the largest number, are differences."""
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    assert are_equal(values, values.clone())
    assert are_equal(torch.tensor([True]), torch.tensor([True]))
    for index, other in ((0, 0.0), (1, largest), (2, -largest), (3, float("nan"))):
        changed = values.clone()
        changed[index] = other
        assert not are_equal(values, changed)


@pytest.mark.slow
def test_features_that_a_model_does_not_have_are_rejected_with_the_reason() -> None:
    class Plain(nn.Sequential):
        """No roles, no parts, no blocks, no positions."""

    results = prove(
        lambda: Plain(nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)), vocab_size=VOCAB, worlds=[2]
    )
    found = {r.cell: r.message for r in results if r.verdict == "refused"}
    assert found.keys() == {"recompute full", "tp", "tp, whole stream", "cp", "pp"}
    assert "parallel_roles" in found["tp"]
    assert "pipeline_parts" in found["pp"]
    assert "positions" in found["cp"]
    assert verdicts(results)["fsdp"] == "green"


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_wrong_role_is_red_and_names_the_parameter() -> None:
    wrong = ROLES | {
        "*.q_norm.*": "sequence"
    }  # sees this rank's heads, so gradients must be summed
    (result,) = prove(Model, roles=wrong, vocab_size=VOCAB, only="tp, whole stream", worlds=[2])
    assert result.verdict == "red"
    assert result.parameter == "layers.1.attention.q_norm.weight"
    assert result.layer == "layers.1"
    assert result.parameter in result.message
    assert result.errors["loss"] <= 1e-5 < result.errors["gradient"]


@pytest.mark.slow
def test_a_head_that_every_rank_fully_computes_is_green() -> None:
    roles = ROLES | {"head.*": "opaque"}
    results = prove(Model, roles=roles, vocab_size=VOCAB, only="tp", worlds=[2])
    assert verdicts(results) == {"tp": "green", "tp, whole stream": "green"}


@pytest.mark.slow
def test_custom_layouts_are_cells() -> None:
    """The third has 24 rows, so that three readers of two micro-batches get as many each."""
    layouts = [{"tp": 2, "pp": 2}, {"cp": 2, "dp_replicate": 2, "recompute": "selective"}]
    results = prove(Model, vocab_size=VOCAB, nproc=4, layouts=layouts)
    assert verdicts(results) == {
        "tp=2 pp=2": "green",
        "cp=2 dp_replicate=2 recompute=selective": "green",
    }
    assert all(0 < r.errors["gradient"] < 1e-5 for r in results)
    (odd,) = prove(Model, vocab_size=VOCAB, nproc=3, layouts=[{"micro_batches": 2}])
    assert (odd.verdict, odd.world) == ("green", 3), odd
    wrong = ROLES | {"*.q_norm.*": "sequence"}
    whole = {"tp": 2, "sequence_parallel": False}
    (red,) = prove(Model, roles=wrong, vocab_size=VOCAB, nproc=2, layouts=[whole])
    assert (red.verdict, red.parameter) == ("red", "layers.1.attention.q_norm.weight")


@pytest.mark.parametrize(
    ("layout", "key", "value", "code"),
    [
        ({"tp": 3}, "dp_shard", -1, "divides"),
        ({"tp": 0}, "tp", 0, "range"),
        ({"tq": 2}, "tq", ..., "unknown_key"),
        ({"device": "cpu"}, "device", ..., "unknown_key"),
        ({"float8": "rowwise"}, "float8", ..., "unknown_key"),
        ({"pp": 2, "micro_batches": 1}, "num_micro_batches", 1, "pp"),
        ({"micro_batches": 0}, "micro_batches", 0, "range"),
        ({"cp": 4}, "seq_len", 18, "divides"),
        ({"tp": "two"}, "tp", "two", "type"),
        ({"tp": 2.0}, "tp", 2.0, "type"),
        ({"compile": "no"}, "compile", "no", "type"),
        ({"memory_budget": "half"}, "memory_budget", "half", "type"),
        ({"reduce_dtype": "bf16"}, "reduce_dtype", "bf16", "precision"),
    ],
)
def test_layouts_that_break_a_rule_are_named_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any], key: str, value: object, code: str
) -> None:
    monkeypatch.setattr(os, "fork", None)
    with rejects(key, value, code, ProveError, where=layout_name(layout)):
        prove(Model, vocab_size=VOCAB, nproc=4, seq_len=18, layouts=[layout])


@pytest.mark.slow
def test_bf16_is_compared_with_fp32_and_with_one_rank() -> None:
    options: dict[str, Any] = {"vocab_size": VOCAB, "worlds": [1, 2], "precision": "bf16"}
    parts = ("accumulation", "tp, whole", "pp", "swapped")
    found = {r.cell: r for part in parts for r in prove(Model, only=part, **options)}
    assert {r.verdict for r in found.values()} == {"green"}, found
    assert all(1e-3 < r.errors["gradient"] < 0.1 for r in found.values())  # of fp32: it is bf16
    # and one rank rounds as they do, but inside of layers
    assert found.pop("tp, whole stream").errors.keys().isdisjoint({"one rank"})
    assert all(r.errors["one rank"] < 1e-6 for r in found.values())
    assert len(found) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cudnn_attention_is_proved_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes heads of a multiple of 8 dims; the settings of a proof leave it out of `auto`."""
    monkeypatch.setattr(sys.modules[__name__], "HEAD", 8)
    layouts = [{"sdpa": "cudnn"}]
    options: dict[str, Any] = {"device": "cuda", "precision": "bf16", "nproc": 1}
    (result,) = prove(Model, vocab_size=VOCAB, layouts=layouts, **options)
    assert result.verdict == "green", result


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_sums_in_bf16_and_wrong_roles_are_red_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of two gradients in bf16 is nearer to fp32 than many roundings before it; one rank is nearer still."""
    wrong = ROLES | {"*.q_norm.*": "sequence"}
    options: dict[str, Any] = {"vocab_size": VOCAB, "worlds": [2], "precision": "bf16"}
    (role,) = prove(Model, roles=wrong, only="tp, whole", **options)
    assert (role.verdict, role.parameter) == ("red", "layers.1.attention.q_norm.weight")

    module = sys.modules["forge_parallel.parallelize"]
    apply_fsdp = module.apply_fsdp

    def rounding(*args: Any, **kwargs: Any) -> nn.Module:
        low = {"reduce_dtype": torch.bfloat16} if dist.get_world_size() > 1 else {}
        return apply_fsdp(*args, **kwargs | low)

    monkeypatch.setattr(module, "apply_fsdp", rounding)
    (low,) = prove(Model, only="fsdp", **options)
    assert low.verdict == "red"
    assert low.errors[ONE_RANK] > ONE_RANK_BOUND
    assert f" from {ONE_RANK} in " in low.message
    assert low.errors["gradient"] < 0.1
    assert low.parameter == "head.weight"


def test_ranks_are_deterministic_and_the_header_has_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def build() -> nn.Module:
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_float32_matmul_precision() == "highest"
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        return Model()

    lines: list[str] = []
    (result,) = prove(build, vocab_size=VOCAB, nproc=1, only="accumulation", header=lines.append)
    assert result.verdict == "green", result
    (line,) = lines
    for part in ("device cpu", torch.__version__, "gloo", "fp32", "deterministic", "bound 1e-05"):
        assert part in line
    assert not torch.are_deterministic_algorithms_enabled()  # here nothing changed
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize(
    ("options", "key", "value", "code"),
    [
        ({"device": "tpu"}, "device", "tpu", "unknown"),
        ({"precision": "fp16"}, "precision", "fp16", "unknown"),
        ({"precision": "tf32"}, "precision", "tf32", "requires"),
        ({"nproc": 0}, "nproc", 0, "range"),
        ({"nproc": 1, "worlds": [2]}, "worlds", [], "empty"),
        ({"tolerance": 0.0}, "tolerance", 0.0, "finite"),
        ({"tolerance": float("inf")}, "tolerance", float("inf"), "finite"),
        ({"timeout": 0.0}, "timeout", 0.0, "range"),
        ({"vocab_size": 1}, "vocab_size", 1, "range"),
        ({"seq_len": 1}, "seq_len", 1, "range"),
        ({"seed": -1}, "seed", -1, "range"),
        ({"layouts": [{"tp": 2}]}, "nproc", ..., "missing"),
    ],
)
def test_impossible_proofs_raise(
    options: dict[str, Any], key: str, value: object, code: str
) -> None:
    with rejects(key, value, code, ProveError):
        prove(Model, **{"vocab_size": VOCAB, **options})


def test_gpus_that_a_process_cannot_have_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine of the tests has one: the number of GPUs and the build of torch are stand-ins."""
    monkeypatch.setattr(torch.version, "cuda", None)
    with rejects("device", "cuda", "build", ProveError):
        prove(Model, device="cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    seen: Devices | None = Devices(2, ("A GPU",), "2.29.7")

    def find() -> Devices:
        if seen is None:
            raise RuntimeError("no driver")
        return seen

    monkeypatch.setattr(sys.modules["forge_parallel.prove.settings"], "find_devices", find)
    with rejects("nproc", 3, "devices", ProveError) as caught:
        prove(Model, device="cuda", nproc=3)
    assert caught.value.problems[0].fix.endswith("nproc 2")
    seen = Devices(0, (), "")
    with rejects("nproc", 1, "devices", ProveError) as caught:
        prove(Model, device="cuda")
    assert caught.value.problems[0].fix.endswith("device cpu")
    seen = None
    with rejects("device", "cuda", "requires", ProveError, where="no driver"):
        prove(Model, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with rejects("CUDA", ..., "initialized", ProveError):
        prove(Model, device="cuda")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with rejects("WORLD_SIZE", "2", "ranks", ProveError):
        prove(Model)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with rejects("process group", ..., "running", ProveError):
        prove(Model)


def test_a_broken_kernel_is_found_by_comparison_with_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cell "GPU beside CPU", whose device is the CPU here."""
    task, device = Task(Model, None, None, VOCAB, 16, 0), torch.device("cpu")
    truth = one_process(task, device)
    (same,) = compare_with_cpu(task, [truth], device)
    assert same.keys() == {*truth.keys}
    assert not any(same.values())
    gelu = F.gelu
    monkeypatch.setattr(F, "gelu", lambda x: gelu(x) * (1 + 1e-3))  # as TF32 could be
    (broken,) = compare_with_cpu(task, [truth], device)
    assert broken[0, "gradient", "layers.0.up.weight"] > CPU_BOUND


class OverRows(Model):
    """Takes the mean of the batch off the stream."""

    def __init__(self) -> None:
        super().__init__()

        class Centred(Block):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x - x.mean(dim=0))

        self.layers[1] = Centred()


@pytest.mark.slow
def test_a_module_that_mixes_rows_is_red_where_rows_are_spread() -> None:
    results = {r.cell: r for r in prove(OverRows, vocab_size=VOCAB, worlds=[2])}
    for cell in ("fsdp", "accumulation", "pp"):
        assert results[cell].verdict == "red"
        assert results[cell].layer == "layers.1", results[cell]
        assert results[cell].parameter.startswith("layers.1.")  # type: ignore[union-attr]
    assert results["tp"].verdict == "green"


@pytest.mark.lane("quick")
def test_builders_and_models_that_have_no_truth_are_reported() -> None:
    def unseeded() -> nn.Module:
        model, generator = Model(), torch.Generator()
        generator.seed()
        nn.init.normal_(model.norm.weight, generator=generator)
        return model

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5)

    def noisy() -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCAB, DIM), Noise(), nn.Linear(DIM, VOCAB))

    def unseeded_buffer() -> nn.Module:
        model, generator = Model(), torch.Generator()
        generator.seed()
        model.register_buffer("noise", torch.randn(DIM, generator=generator))
        model.register_buffer("unwritten", torch.empty(DIM))  # is nan, and no mistake
        return model

    class Of(Model):
        """Its output is changed by a function."""

        def __init__(self, change: Callable[[Tensor], Any]) -> None:
            super().__init__()
            self.change = change

        def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Any:
            return self.change(super().forward(tokens, positions))

    with rejects("build", ..., "random", ProveError, where="norm.weight"):
        prove(unseeded, vocab_size=VOCAB)
    with rejects("build", ..., "random", ProveError, where="noise"):
        prove(unseeded_buffer, vocab_size=VOCAB)
    with rejects("forward", "tuple", "logits", ProveError):
        prove(Of, args={"change": lambda x: (x, 0)}, vocab_size=VOCAB)
    with rejects("forward", (), "logits", ProveError):
        prove(Of, args={"change": torch.mean}, vocab_size=VOCAB)
    with rejects("model", ..., "finite", ProveError, where="loss"):
        prove(Of, args={"change": lambda x: x * torch.nan}, vocab_size=VOCAB)
    with rejects("build", "int", "type", ProveError):
        prove(lambda: 3, vocab_size=VOCAB)  # type: ignore[arg-type,return-value]
    with rejects("forward", ..., "random", ProveError):
        prove(noisy, vocab_size=VOCAB)
    with rejects("model", ..., "raised", ProveError, where="IndexError"):
        prove(Model, vocab_size=VOCAB + 1000)
    with rejects("import", "no_such_lab.model:build", "not_found", ProveError):
        prove("no_such_lab.model:build")
    with rejects("worlds", [3], "empty", ProveError):
        prove(Model, worlds=[3])


@pytest.mark.slow
def test_a_rank_that_raises_or_hangs_is_red_and_does_not_block_the_others() -> None:
    class Alone(Model):
        def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
            if dist.is_initialized() and dist.get_rank() == 1:
                if self.hangs:
                    time.sleep(600)
                raise RuntimeError("no")
            return super().forward(tokens, positions)

    def build(hangs: bool) -> nn.Module:
        model: Any = Alone()
        model.hangs = hangs
        return model

    began = time.monotonic()
    (raised,) = prove(build, args={"hangs": False}, vocab_size=VOCAB, only="fsdp", worlds=[2])
    (hung,) = prove(
        build, args={"hangs": True}, vocab_size=VOCAB, only="fsdp", worlds=[2], timeout=3
    )
    assert (raised.verdict, hung.verdict) == ("red", "red")
    assert "on rank 1 it raised RuntimeError: no" in raised.message
    assert "within 3 s" in hung.message
    assert time.monotonic() - began < 15


def test_after_an_exception_other_ranks_have_a_short_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[float] = []
    wait = processes.connections.wait

    def at_once(links: Any, seconds: float) -> list[Any]:
        left.append(seconds)
        return wait(links, 0.0)

    monkeypatch.setattr(processes.connections, "wait", at_once)
    pipes = [processes.connections.Pipe() for _ in range(2)]
    pipes[1][1].send_bytes(pickle.dumps(processes.ExitStatus("KeyError", "no")))
    links = {rank: own for rank, (own, _) in enumerate(pipes)}
    waiting, raised = processes._collect(links, 600)
    assert (waiting.kind, raised.kind) == ("lost", "KeyError")
    first, second = left
    assert second <= processes._GRACE_SECONDS < 60 < first


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_caller_whose_threads_have_run_can_prove() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(512, 512).matmul(torch.randn(512, 512)).softmax(-1)
        (result,) = prove(Model, vocab_size=VOCAB, worlds=(2,), only="accumulation", timeout=20)
    finally:
        torch.set_num_threads(threads)
    assert result.verdict == "green"


@pytest.mark.slow
def test_a_caller_that_left_process_groups_can_prove() -> None:
    """Ranks must not collect a group of the caller, as the threads that it would join are not there."""

    def collecting() -> nn.Module:
        gc.collect()
        return Model()

    class Left:
        """A cycle, as models and meshes make them."""

        def __init__(self) -> None:
            self.me, self.group = self, dist.ProcessGroupGloo(dist.HashStore(), 0, 1)

    gc.disable()
    try:
        Left()
        (result,) = prove(
            collecting, vocab_size=VOCAB, worlds=(2,), only="accumulation", timeout=20
        )
    finally:
        gc.enable()
        gc.collect()
    assert result.verdict == "green", result


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")  # fake groups have none
def test_a_caller_that_had_a_fake_group_can_prove() -> None:
    """DTensor keeps what it worked out for meshes that look like those of the ranks, and had other names."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        config = ParallelConfig(device="cpu", precision="fp32", tp=2)
        model = parallelize(Model(), config, make_meshes(config), seq_len=16)
        model(torch.zeros(4, 16, dtype=torch.int64)).sum().backward()
    finally:
        dist.destroy_process_group()
    (result,) = prove(Model, vocab_size=VOCAB, worlds=(4,), only="x tp, whole")
    assert result.verdict == "green", result


def test_a_caller_that_cannot_fork_any_more_gets_a_fix() -> None:
    """A CUDA build starts a thread for each device at the first backward; this stands in for its error."""

    class Forked(Model):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(
                "Unable to handle autograd's threading with fork-based multiprocessing."
            )

    with rejects("this process", ..., "backward", ProveError):
        prove(Forked, vocab_size=VOCAB, worlds=(2,), only="accumulation", timeout=20)


@pytest.mark.slow
def test_a_tiny_llama_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")

    def build() -> nn.Module:
        config = transformers.LlamaConfig(
            **{"vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": 32},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            use_cache=False,
        )
        return transformers.AutoModelForCausalLM.from_config(config)

    results = {r.cell: r for r in prove(build, vocab_size=VOCAB, worlds=[2])}
    refused = {name for name, result in results.items() if result.verdict == "refused"}
    assert refused == {"cp", "pp"}
    assert "LlamaForCausalLM" in results["cp"].message
    assert all(r.verdict == "green" for name, r in results.items() if name not in refused), results
    assert all("text" in r.errors for name, r in results.items() if name not in refused)


class ByRow(Block):
    """Rows go up through one of two layers, by the sign of what they begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        rows = (self.norm_2(row) for row in x)
        up = [self.up(row) if row[0, 0] > 0 else self.other(row) for row in rows]
        return x + self.down(F.gelu(torch.stack(up)))


def with_blocks(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Model()
        model.layers = nn.ModuleList([make() for _ in range(2)])
        return model

    return build


class Fused(Attention):
    def forward(self, x: Tensor) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        weight, bias = (torch.cat([getattr(p, n) for p in projections]) for n in ("weight", "bias"))
        parts = F.linear(x, weight, bias).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, HEAD)) for part in parts)
        return self.o_proj(self.attend(self.q_norm(q), k, v, None).flatten(-2))


def fused() -> nn.Module:
    block = Block()
    block.attention = Fused()
    return block


class Functional(Model):
    """The head is a function of the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(super().forward(tokens), self.embedding.weight)

    def parallel_roles(self) -> dict[str, str]:
        return {row: role for row, role in ROLES.items() if row != "head.*"}


def dropping() -> nn.Module:
    block: Any = Block()
    block.down = nn.Sequential(block.down, nn.Dropout(0.5))
    return block


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_F86_rows_that_take_different_ways_are_green_row_by_row() -> None:
    (result,) = prove(with_blocks(ByRow), vocab_size=VOCAB, only="row by", worlds=[2])
    assert result.verdict == "green", result


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("build", [with_blocks(fused), Functional], ids=["fused", "functional"])
def test_F87_sharded_weights_in_foreign_code_are_red_with_the_reason(
    build: Callable[[], nn.Module],
) -> None:
    results = prove(build, vocab_size=VOCAB, only="tp", worlds=[2])
    assert len(results) == 2
    for result in results:
        assert_problem(result, "weight", ..., "foreign")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_F88_weights_swapped_around_an_evaluation_are_green() -> None:
    (result,) = prove(Model, vocab_size=VOCAB, only="swapped", worlds=[2])
    assert result.verdict == "green", result


class Stale(nn.Linear):
    """Keeps its weight until the version of it is another, which FSDP2 does not count."""

    version = None

    def forward(self, x: Tensor) -> Tensor:
        if self.version != self.weight._version:
            self.version, self.kept = self.weight._version, self.weight.detach().clone()
        return super().forward(x) + F.linear(x, self.kept)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_layer_with_an_old_weight_is_named() -> None:
    def build() -> nn.Module:
        model = Model()
        model.layers[1].up = Stale(DIM, 2 * DIM)
        return model

    (result,) = prove(build, vocab_size=VOCAB, only="fsdp", worlds=[2])
    assert (result.verdict, result.layer) == ("red", "layers.1"), result
    assert "stream after layers.1 in step 2 differs first" in result.message


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_step_that_is_not_made_is_red_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes a weight by less than the bound of bf16."""
    clip = clip_grads_

    def losing(parameters: Any, *args: Any) -> None:
        kept = list(parameters)
        clip(kept, *args)
        if dist.is_initialized():
            kept[-3].grad = None

    monkeypatch.setattr(sys.modules["forge_parallel.prove.ranks"], "clip_grads_", losing)
    (result,) = prove(Model, vocab_size=VOCAB, only="fsdp", worlds=[2], precision="bf16")
    assert (result.verdict, result.parameter) == ("red", "layers.1.down.bias"), result


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_small_gradients_that_rounding_of_large_ones_reaches_are_green_in_bf16() -> None:
    """With weights of 0.02 attention is nearly uniform: q and k have gradients of 1e-4 of the largest."""

    def build() -> nn.Module:
        model = Model(layers=4)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        return model

    (result,) = prove(build, vocab_size=VOCAB, nproc=2, layouts=[{"tp": 2}], precision="bf16")
    assert result.verdict == "green", result


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_choices_that_rounding_changes_are_due_to_the_precision() -> None:
    """As experts that the router likes equally well."""

    class Choosing(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x + (x > 0.5).to(x.dtype)

    (result,) = prove(
        with_blocks(Choosing), vocab_size=VOCAB, only="fsdp", worlds=[2], precision="bf16"
    )
    assert result.verdict == "red"
    assert result.message.endswith(SAME_IN_ONE_RANK)
    assert result.errors["one rank"] < 1e-6


@pytest.mark.slow
def test_F89_dropout_is_off_and_rejected_under_tp() -> None:
    roles = ROLES | {"*.down.*": "rowwise"}
    results = prove(with_blocks(dropping), roles=roles, vocab_size=VOCAB, only="p", worlds=[2])
    found = verdicts(results)
    assert found["tp"] == found["tp, whole stream"] == "refused"
    assert found["fsdp"] == "green"


LAB = """
import torch
from torch import nn

class Twice(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(64, width), nn.Linear(width, 32), nn.Linear(32, width)
        self.head = nn.Linear(width, 64)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.head(x + self.down(torch.tanh(self.up(x))))

def build(width=8):
    return Twice(width)
"""
TABLE = '[roles]\n"table.*" = "vocab"\n"up.*" = "colwise"\n"down.*" = "rowwise"\n"head.*" = "sharded_logits"\n'


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_lab.py").write_text(LAB)
    (tmp_path / "roles.toml").write_text(TABLE)
    # whole on every rank, where the gradients of all ranks are equal and must not be summed
    wrong = TABLE.replace("colwise", "replicate_sum_grad").replace("rowwise", "replicate_sum_grad")
    (tmp_path / "wrong.toml").write_text(wrong)
    (tmp_path / "numbers.toml").write_text(TABLE.replace('"colwise"', "3"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "broken.py").write_text("undefined")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_ranks_find_imported_what_the_model_imports(lab: Path) -> None:
    """One process imports it to train, and the caller after it; models of transformers take seconds."""
    (lab / "heavy_part.py").write_text("open('imports', 'a').write('x')\n")

    def build() -> nn.Module:
        importlib.import_module("heavy_part")
        return Model()

    sys.path.insert(0, str(lab))
    (result,) = prove(build, vocab_size=VOCAB, worlds=(2,), only="accumulation")
    assert result.verdict == "green"
    assert (lab / "imports").read_text() == "xx"


COMMAND = ("--world", "2", "--only", "whole")


def test_the_command(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["my_lab:build", "--roles", "wrong.toml", *COMMAND]) == 1
    assert {"down.bias", "1.0e+00"} <= set(re.split(r"[ ,;]+", capsys.readouterr().out))
    assert main(["my_lab:missing", *COMMAND]) == 2
    assert "my_lab:missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "key", "value", "code"),
    [
        (["my_lab:missing"], "import", "my_lab:missing", "not_found"),
        (["my_lab:__name__"], "import", "my_lab:__name__", "not_found"),
        (["my_lab:build", "--args", "depth=2"], "model", ..., "raised"),
        (["my_lab:build", "--args", "depth"], "--args", "depth", "syntax"),
        (["my_lab:build", "--args", "width=8", "width=16"], "--args width", ..., "duplicate"),
        (["my_lab:build", "--roles", "none.toml"], "--roles", "none.toml", "toml"),
        (["my_lab:build", "--roles", "bytes.toml"], "--roles", "bytes.toml", "toml"),
        (["my_lab:build", "--roles", "empty.toml"], "--roles", "empty.toml", "table"),
        (["my_lab:build", "--world", "two"], "--world", "two", "type"),
        (["broken:build"], "import", "broken:build", "raised"),
    ],
)
def test_flags_that_cannot_be_used_are_named(
    lab: Path, arguments: list[str], key: str, value: object, code: str
) -> None:
    with rejects(key, value, code, ProveError):
        run([*COMMAND, *arguments])


def test_a_role_that_is_a_number_is_rejected_in_its_cell(lab: Path) -> None:
    (result,) = run(["my_lab:build", "--roles", "numbers.toml", *COMMAND])
    assert result.verdict == "refused"
    assert_problem(result, "up.*", 3, "type")  # type: ignore[arg-type]


@pytest.mark.lane("test")
def test_a_layout_of_experts_is_rejected_as_nothing_shards_them(lab: Path) -> None:
    (result,) = run(["my_lab:build", "--layout", "ep=2", "--nproc", "2"])
    assert result.verdict == "refused"
    assert_problem(result, "ep", 2, "unsupported")  # type: ignore[arg-type]


@pytest.mark.slow
def test_ambiguous_blocks_raise_and_may_be_named() -> None:
    class Two(Model):
        """Two lists of equal length, and no methods."""

        blocks = pipeline_parts = None  # type: ignore[assignment]

        def __init__(self) -> None:
            super().__init__()
            self.more = nn.ModuleList([Block() for _ in range(2)])

        def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
            x = self.embedding(tokens)
            for block in [*self.layers, *self.more]:
                x = block(x)
            return self.head(self.norm(x))

    with rejects("blocks", ["layers", "more"], "ambiguous", ProveError):
        prove(Two, vocab_size=VOCAB, only="recompute", worlds=[2])
    both = ["layers.*", "more.*"]
    (result,) = prove(Two, blocks=both, vocab_size=VOCAB, only="recompute", worlds=[2])
    assert result.verdict == "green", result


@pytest.mark.slow
def test_the_command_in_a_process_of_its_own(lab: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "forge_parallel.prove",
        "my_lab:build",
        "--roles",
        "roles.toml",
    ]
    command += ["--args", "width=16", "--world", "2", "--only", "tp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 green" in done.stdout

"""The stack of experts: backends, tails, idle experts, syncs, autocast, float8, meta."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import forge_moe.experts as experts_module
from forge_moe import Experts, MoE, MoEConfig, grouped_mm
from forge_moe.experts import ClampedSwiGLU
from forge_moe.grouped_mm import BATCHED, GROUPED_MM, LOOP, _float8, choose_backend, to_float8
from forge_testing.problems import rejects
from forge_testing.traffic import Traffic

pytestmark = pytest.mark.lane("test")

BACKENDS = ["loop", "grouped_mm", "batched", "float8"]


def experts(num: int = 4, **settings) -> Experts:
    torch.manual_seed(0)
    built = Experts(MoEConfig(**{"dim": 8, "hidden_dim": 16, "num_experts": num, **settings}))
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return built


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tail_is_neither_computed_nor_allowed_to_poison(
    backend: str, activation: str, dtype: torch.dtype
) -> None:
    """Torch leaves what lies beyond the groups as it finds it, forward and backward."""
    one = experts(backend=backend, bias=True, activation=activation).to(dtype)
    counts = torch.tensor([2, 0, 3, 0])
    rows = torch.randn(9, 8).to(dtype)
    alone = rows[:5].clone().requires_grad_()
    one(alone, counts).float().square().sum().backward()
    wanted = [p.grad.clone() for p in one.parameters()]
    one.zero_grad()
    rows[5:] = float("nan")
    rows.requires_grad_()
    out = one(rows, counts)
    upstream = 2 * out.detach().float()
    upstream[5:] = float("inf")
    out.float().backward(upstream)
    assert (out[5:] == 0).all()
    assert (rows.grad[5:] == 0).all()
    assert torch.equal(out[:5], one(alone, counts))
    assert torch.equal(rows.grad[:5], alone.grad)
    for parameter, gradient in zip(
        one.parameters(), wanted
    ):  # sums over rows: BLAS minds alignment
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_F30_an_idle_expert_has_an_exact_zero_gradient(backend: str) -> None:
    one = experts(backend=backend, bias=True)
    for counts in ([0, 5, 0, 0], [0, 0, 0, 0]):
        rows = torch.randn(sum(counts), 8, requires_grad=True)
        one.zero_grad(set_to_none=True)
        one(rows, torch.tensor(counts)).sum().backward()
        for parameter in one.parameters():
            idle = parameter.grad[torch.tensor(counts) == 0]
            assert (idle == 0).all()


class Watch(TorchDispatchMode):
    """Names of the ops that run, with the number of rows of each matrix product's left side."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


HOST_READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "bincount",
}


@pytest.fixture
def no_host_reads(monkeypatch):
    """Reading values by a CPU tensor's own methods makes no op: they raise instead."""

    def refuse(self, *_, **__):
        raise AssertionError("a value was read on the host")

    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, refuse)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bias": True, "num_shared_experts": 1},
        {"capacity_factor": 1.0, "drop_policy": "probability"},
        {"router": "sigmoid_topk", "bias_update_rate": 1e-3, "num_groups": 2, "top_groups": 1},
        {"router": "expert_choice"},
        {"aux": "attach", "aux_loss_weight": 0.1, "z_loss_weight": 0.1, "aux_scope": "sequence"},
    ],
)
def test_F29_no_host_sync_and_three_matmuls_forward_six_back(settings, no_host_reads) -> None:
    moe = MoE(MoEConfig(8, 16, 4, backend="grouped_mm", **settings))
    x = torch.randn(2, 6, 8, requires_grad=True)
    ctx = type("Ctx", (), {"valid": torch.ones(2, 6, dtype=torch.bool), "document_ids": None})
    with Watch() as forward:
        y = moe(x, ctx)
    with Watch() as backward:
        y.sum().backward()
    sums = 3 if settings.get("bias") else 0
    assert not HOST_READS & {*forward.names, *backward.names}
    assert forward.names.count("_grouped_mm") == 3
    assert backward.names.count("_grouped_mm") == 6 + sums
    assert "bmm" not in {*forward.names, *backward.names}


def test_F29_no_padding_rows() -> None:
    """However uneven the load, each product sees T K rows."""
    seen = []
    multiply = GROUPED_MM.multiply
    moe = MoE(MoEConfig(8, 16, 64, top_k=2))
    moe.router.weight.data[:2] = 100.0
    watched = GROUPED_MM._replace(
        multiply=lambda x, w, g: (seen.append(x.size(0)), multiply(x, w, g))[1]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forge_moe.grouped_mm.GROUPED_MM", watched)
        moe(torch.rand(50, 8, requires_grad=True)).sum().backward()
    assert seen == [100] * 6


@pytest.mark.parametrize(
    ("sizes", "tail", "backend"),
    [
        ((4, 4, 4), 0, BATCHED),
        ((4, 4, 4), 3, BATCHED),
        ((5, 0, 3), 0, BATCHED),
        ((2, 0, 0), 4, BATCHED),
        ((0, 0, 0), 2, BATCHED),
        ((600, 1, 2), 0, GROUPED_MM),
    ],
)
def test_one_batch_of_all_experts_on_a_cpu_equals_the_loop(sizes, tail, backend) -> None:
    experts = Experts(MoEConfig(8, 16, 3, bias=True))
    counts, x = torch.tensor(sizes), torch.randn(sum(sizes) + tail, 8)
    x[sum(sizes) :] = torch.nan
    assert choose_backend("auto", x, (8, 16), counts) is backend
    found = []
    for name in ("auto", "loop"):
        experts.config = MoEConfig(8, 16, 3, bias=True, backend=name)
        inputs = x.clone().requires_grad_()
        y = experts(inputs, counts)
        parameters = list(experts.parameters())
        found.append((y, *torch.autograd.grad(y.square().sum(), (inputs, *parameters))))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_the_choice_of_a_backend(monkeypatch) -> None:
    def pick(dtype: torch.dtype, *widths: int) -> object:
        return choose_backend("auto", torch.empty(1, widths[0], dtype=dtype), widths)

    assert pick(torch.bfloat16, 8, 16) is GROUPED_MM
    assert pick(torch.bfloat16, 8, 12) is LOOP
    assert pick(torch.float32, 4, 12) is GROUPED_MM
    assert pick(torch.float32, 4, 6) is LOOP
    assert pick(torch.float64, 8, 16) is LOOP
    with rejects("backend", "grouped_mm", "widths"):
        choose_backend("grouped_mm", torch.empty(1, 8, dtype=torch.bfloat16), (8, 12))
    with rejects("backend", "grouped_mm", "dtype"):
        choose_backend("grouped_mm", torch.empty(1, 8, dtype=torch.float64), (8, 16))
    monkeypatch.setattr("forge_moe.grouped_mm.is_compiling_or_fake", lambda x: True)
    with rejects("backend", "grouped_mm", "compile"):
        choose_backend("grouped_mm", torch.empty(1, 8), (8, 16))
    monkeypatch.setattr("forge_moe.grouped_mm.grouped_mm", None)
    with rejects("backend", "grouped_mm", "requires"):
        choose_backend("grouped_mm", torch.empty(1, 8), (8, 16))


def test_float8_on_a_gpu_needs_its_rows_and_its_kernel(monkeypatch) -> None:
    x = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    with rejects("backend", "float8", "precision"):
        _float8(x, (16, 24))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with rejects("backend", "float8", "device"):
        _float8(x, (16, 32))


def test_widths_that_the_kernel_cannot_take_use_the_loop() -> None:
    one = experts(dim=6, hidden_dim=7)
    rows = torch.randn(5, 6, requires_grad=True)
    one(rows, torch.tensor([1, 0, 4, 0])).sum().backward()
    wanted = F.silu(rows[0] @ one.gate_proj[0]) * (rows[0] @ one.up_proj[0]) @ one.down_proj[0]
    torch.testing.assert_close(one(rows, torch.tensor([1, 0, 4, 0]))[0], wanted)


def test_clamped_values_have_no_gradient_and_their_limit_does() -> None:
    """As torch.clamp has it, from 2.14 on without a gradient at the limit; in float64, next to the definition."""
    activation = ClampedSwiGLU(1.3, 2.0)
    x = torch.linspace(-3, 3, 26, dtype=torch.float64).roll(7)
    x = torch.cat((x, torch.tensor([2.0, 2.0, -2.0, -2.0, 5.0, -5.0]))).view(4, 8)
    grad = torch.randn(4, 4, dtype=torch.float64)
    mine = x.clone().requires_grad_()
    gate, up = mine[:, ::2].clamp(max=2.0), mine[:, 1::2].clamp(-2.0, 2.0)
    wanted = (up + 1) * (gate * torch.sigmoid(gate * 1.3))
    wanted.backward(grad)
    torch.testing.assert_close(activation.forward(x), wanted.detach())
    torch.testing.assert_close(activation.backward(grad, x), mine.grad)


@pytest.mark.parametrize(
    ("activation", "key", "value", "code"),
    [
        ("swiglu", "swiglu_limit", 5.0, "foreign"),
        ("swiglu", "swiglu_alpha", 1.0, "foreign"),
        ("clamped_swiglu", "swiglu_limit", 0.0, "range"),
        ("clamped_swiglu", "num_shared_experts", 1, "activation"),
    ],
)
def test_keys_of_an_activation(activation: str, key: str, value: float, code: str) -> None:
    with rejects(key, value, code):
        MoEConfig(8, 16, 4, activation=activation, **{key: value})


def test_float8_is_its_definition() -> None:
    """Each product of rounded rows and rounded columns, in float64."""

    def rounded(x: torch.Tensor, dim: int) -> torch.Tensor:
        scale = x.abs().amax(dim, keepdim=True).float().clamp_min(1e-12) / 448.0
        return (x.float() / scale).to(torch.float8_e4m3fn).double() * scale

    one, rows = experts(backend="float8"), torch.randn(7, 8, requires_grad=True)
    counts, upstream = torch.tensor([3, 0, 4, 0]), torch.randn(7, 8)
    out = one(rows, counts)
    out.backward(upstream)
    for e, part in ((0, slice(0, 3)), (2, slice(3, 7))):
        x, g = rows[part].detach(), upstream[part]
        w_gate, w_up, w_down = (p[e].detach() for p in (one.gate_proj, one.up_proj, one.down_proj))
        gate, up = (rounded(x, 1) @ rounded(w, 0) for w in (w_gate, w_up))
        hidden = F.silu(gate) * up
        # operands are rounded in fp32: an element next to a border may fall on its other side
        torch.testing.assert_close(
            out[part].double(), rounded(hidden, 1) @ rounded(w_down, 0), rtol=0.02, atol=0.02
        )
        torch.testing.assert_close(
            one.down_proj.grad[e].double(), hidden.T @ g.double(), rtol=1e-4, atol=1e-4
        )


def test_float8_is_near_full_precision() -> None:
    rows, counts = torch.randn(64, 8), torch.tensor([20, 0, 40, 4])
    plain, low = experts()(rows, counts), experts(backend="float8")(rows, counts)
    assert 1e-4 < (plain - low).norm() / plain.norm() < 0.08
    values, scale, _ = to_float8(torch.tensor([[0.0, 0.0], [1.0, -4.0]]), dim=1)
    assert values.float().mul(scale).tolist() == [[0.0, 0.0], [1.0, -4.0]]


def casts_made(monkeypatch) -> list[int]:
    """Numbers of dims of the tensors that float8 casts from now on: 2 of rows, 3 of matrices."""
    made = []
    cast = grouped_mm.to_float8
    monkeypatch.setattr(
        grouped_mm, "to_float8", lambda x, dim: made.append(x.dim()) or cast(x, dim)
    )
    return made


def reset(one: Experts, way: str) -> None:
    """Change the weights in each way in which a job does."""
    if way == "step":
        torch.optim.SGD(one.parameters(), lr=0.5).step()
    elif way == "load_state_dict":
        one.load_state_dict({n: p + 1 for n, p in one.state_dict().items()})
    elif way == "rollback":  # copied in place, as a checkpoint is restored
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.copy_(parameter + 1)
    elif way == "another tensor":
        for name, parameter in list(one.named_parameters()):
            setattr(one, name, torch.nn.Parameter(parameter + 1))
    else:
        for parameter in one.parameters():
            parameter.data.add_(1)
        one.drop_casts()


@pytest.mark.parametrize("way", ["step", "load_state_dict", "rollback", "another tensor", "data"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_casts_of_matrices_are_made_once_until_weights_change(monkeypatch, way, dtype) -> None:
    one, made = experts(backend="float8"), casts_made(monkeypatch)
    rows, counts = torch.randn(7, 8, requires_grad=True), torch.tensor([3, 0, 4, 0])

    def values(module: Experts) -> list[torch.Tensor]:
        made.clear()
        module.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            out = module(rows, counts)
        (grad,) = torch.autograd.grad(out.sum(), [rows], retain_graph=True)
        (out * 1.0).sum().backward()
        return [out, grad, *(p.grad for p in module.parameters())]

    def same(found, wanted) -> bool:
        return all(map(torch.equal, found, wanted))

    first = values(one)
    assert made.count(3) == 6  # three matrices and their transposes
    again = values(one)
    assert made.count(3) == 0
    assert (
        made.count(2) == 2 + 2 * 3
    )  # rows of gate and up are cast once, gradients in each backward
    assert same(again, first)

    reset(one, way)
    changed = values(one)
    assert made.count(3) == 6
    fresh = experts(backend="float8")
    fresh.load_state_dict(one.state_dict())
    assert same(changed, values(fresh))
    assert not same(changed, first)


def test_a_backward_after_a_change_uses_the_weights_of_its_forward() -> None:
    """Under autocast the backward reads copies of the weights, which autograd lets change in between."""
    rows, counts = torch.randn(7, 8, requires_grad=True), torch.tensor([3, 0, 4, 0])
    gradients = []
    for changes in (False, True):
        one = experts(backend="float8")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = one(rows, counts)
            if changes:
                reset(one, "rollback")
                one(rows, counts).sum().backward()
        gradients += torch.autograd.grad(out.sum(), [rows])
    assert torch.equal(*gradients)


def test_casts_are_no_state_of_the_module() -> None:
    one, counts = experts(backend="float8"), torch.tensor([3, 0, 4, 0])
    rows = torch.randn(7, 8)
    wanted = one(rows, counts)
    for twin in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert torch.equal(twin(rows, counts), wanted)
        with torch.no_grad():
            twin.up_proj.add_(1)
        assert not torch.equal(twin(rows, counts), wanted)
    assert torch.equal(one(rows, counts), wanted)


def test_bytes_of_float8_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of 8 experts of an 8 x 7B model for 8192 tokens, with kept casts: 45 GB, as shapes."""
    monkeypatch.setattr(experts_module, "choose_backend", lambda *given: grouped_mm.SCALED)
    monkeypatch.setattr(experts_module, "is_compiling_or_fake", lambda x: False)
    with torch.device("meta"):
        one = Experts(MoEConfig(4096, 14336, 8, backend="float8")).bfloat16()
        rows = torch.empty(2 * 8192, 4096, dtype=torch.bfloat16, requires_grad=True)
        counts = torch.empty(8, dtype=torch.int64)
    for _ in range(2):
        one.zero_grad()
        with Traffic() as traffic:
            one(rows, counts, full=True).backward(torch.empty_like(rows))
    assert traffic.bytes < 45e9


def test_under_autocast_rows_and_matrices_are_bf16() -> None:
    one, counts = experts(), torch.tensor([3, 0, 4, 0])
    rows = torch.randn(7, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = one(rows, counts)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert one.up_proj.grad.dtype == torch.float32
    half = experts().bfloat16()
    assert torch.equal(out, half(rows.bfloat16(), counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [{"num_shared_experts": 1}, {"activation": "clamped_swiglu", "router_bias": True}],
)
def test_on_meta_the_shapes_are_right(settings: dict, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        moe = MoE(MoEConfig(8, 16, 4, bias=True, **settings)).to(dtype)
        x = torch.empty(2, 3, 8, dtype=dtype, requires_grad=True)
    y = moe(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert all(p.grad.shape == p.shape for p in moe.parameters())
    assert moe.counters.step_counts is None


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "clamped_swiglu"])
def test_fake_tensors_count_flops(activation: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        moe = MoE(MoEConfig(8, 16, 4, activation=activation))
        moe(torch.randn(10, 8))
    assert counter.get_total_flops() == 10 * moe.flops_per_token(1)


def test_counts_that_do_not_fit_are_rejected() -> None:
    with rejects("counts", (3,), "shape"):
        experts()(torch.randn(3, 8), torch.tensor([1, 1, 1]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["grouped_mm", "float8"])
def test_on_a_gpu_nothing_waits_and_the_values_are_the_loops(backend: str) -> None:
    if backend == "float8" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs capability 9.0")
    torch.manual_seed(0)
    moe = MoE(MoEConfig(64, 128, 8, backend=backend, bias=True)).cuda().bfloat16()
    x = torch.randn(100, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    moe(x).sum().backward()
    moe.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = moe(x)
        y.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loop = MoE(MoEConfig(64, 128, 8, backend="loop", bias=True)).cuda().bfloat16()
    loop.load_state_dict(moe.state_dict())
    error = (loop(x) - y).float().norm() / y.float().norm()
    assert error < (0.1 if backend == "float8" else 0.01)

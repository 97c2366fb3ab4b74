"""load_weights: which tensors are copied, what is refused, and that every rank verifies before one changes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forge_ckpt import CheckpointMismatch, CorruptCheckpoint, SavedTensors, Store
from forge_ckpt.weights import WeightsReport, load_weights, match_weights
from forge_testing import run_on_ranks
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")


class Net(nn.Module):
    def __init__(self, classes=3, extra=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
        self.head = nn.Linear(7, classes)
        if extra:
            self.adapter = nn.Linear(7, 2, bias=False)


BODY = [f"body.0.{n}" for n in ("weight", "bias")] + [
    f"body.1.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
]
HEAD = ["head.weight", "head.bias"]


@pytest.fixture
def saved(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.body(torch.randn(4, 5))).sum().backward()
    optimizer.step()
    with Store(tmp_path / "store") as store:
        store.save(4, {"model": model, "optimizer": optimizer, "cursor": 9})
    return tmp_path / "store", {n: t.clone() for n, t in model.state_dict().items()}


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b, names):
    return all(torch.equal(a[name], b[name]) for name in names)


def test_a_full_model(saved):
    root, wanted = saved
    for path in (root, root / "step-00000004"):
        model = Net(seed=1)
        assert load_weights(path, model) == WeightsReport(BODY + HEAD, [], [])
        assert same(values(model), wanted, wanted)


def test_another_model_with_patterns(saved):
    root, wanted = saved
    model = Net(classes=10, extra=True, seed=1)
    before = values(model)
    report = load_weights(root, model, ["*", "!head.*"])
    assert report == WeightsReport(BODY, [*HEAD, "adapter.weight"], HEAD)
    assert same(values(model), wanted, BODY)
    assert same(values(model), before, [*HEAD, "adapter.weight"])
    model = Net(seed=1)
    report = load_weights(root, model, ["body.0.*"])
    assert report.copied == BODY[:2]
    assert report.unused == BODY[2:] + HEAD == report.fresh


def test_shapes_that_differ_are_named_and_nothing_changes(saved):
    root, _ = saved
    model = Net(classes=10, seed=1)
    before = values(model)
    with rejects("head.weight", (10, 7), "shape", CheckpointMismatch, where="(3, 7)") as caught:
        load_weights(root, model)
    assert_problem(caught.value, "head.bias", (10,), "shape")
    assert_problem(caught.value, "", ..., "weights")
    assert same(values(model), before, before)


def test_other_dtypes_are_cast_and_tied_tensors_stay_tied(tmp_path):
    model = Net(classes=7)
    model.body[0] = nn.Linear(7, 7, bias=False)
    model.head.weight = model.body[0].weight
    with Store(tmp_path) as store:
        store.save(0, {"net": {"model": model.state_dict()}, "model": model})
    other = Net(classes=7, seed=1).bfloat16()
    other.body[0] = nn.Linear(7, 7, bias=False, dtype=torch.bfloat16)
    other.head.weight = other.body[0].weight
    assert load_weights(tmp_path, other).fresh == []
    assert torch.equal(other.head.weight, model.head.weight.bfloat16())
    assert other.head.weight is other.body[0].weight


def test_invalid_arguments_are_rejected(saved):
    root, _ = saved
    for patterns, model in ((["!*"], Net()), (["*"], nn.Sequential(nn.Linear(5, 7)))):
        with rejects("patterns", patterns, "nothing", where="'body.0.weight'"):
            load_weights(root, model, patterns)
    with rejects("key", "ema", "not_found", where="'model.body.0.weight'"):
        load_weights(root, Net(), key="ema")
    with torch.device("meta"):
        model = Net()
    with rejects("body.0.weight", ..., "meta", CheckpointMismatch):
        load_weights(root, model)
    with rejects("path", str(root / "none"), "not_found"):
        load_weights(root / "none", Net())


def test_only_exclusions_select_the_rest(saved):
    root, wanted = saved
    model = Net(classes=10, seed=1)
    assert load_weights(root, model, ["!head.*"]) == WeightsReport(BODY, HEAD, HEAD)
    assert same(values(model), wanted, BODY)


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (["body.*", "heads.*"], "'head.*'"),
        (["*", "!heat.weight"], "'!head.weight'"),
        (["body.*", "adapter.*"], ""),
    ],
)
def test_a_pattern_that_matches_nothing_is_rejected_with_the_nearest_name(saved, patterns, wanted):
    model = Net(extra=True, seed=1)
    before = values(model)
    with rejects("patterns", patterns[1], "unmatched") as caught:
        load_weights(saved[0], model, patterns)
    assert wanted in caught.value.problems[0].fix
    assert same(values(model), before, before)


def test_a_match_lists_what_a_load_would_do_before_anything_is_built(saved):
    root, _ = saved
    with torch.device("meta"):
        model, other = Net(extra=True), Net(classes=10)
    with SavedTensors(root) as source:
        assert (source.step, source.keys()) == (4, ["model", "optimizer", "cursor"])
        there = source.below("model")
        assert source.digest in (source.path / "manifest.json").read_text()
    patterns = ["*", "!head.*"]
    report = match_weights(model.state_dict(), there, patterns)
    assert report == load_weights(root, Net(extra=True), patterns)
    with rejects("head.weight", (10, 7), "shape", CheckpointMismatch, where="(3, 7)"):
        match_weights(other.state_dict(), there)


def test_a_report_names_the_tensors_that_only_one_has():
    assert WeightsReport(["a"], [], []).difference == ""
    assert "b1" in WeightsReport(["a"], ["b1"], ["c1"]).difference
    assert "c1" in WeightsReport(["a"], [], ["c1"]).difference
    many = str(WeightsReport(["a"], [f"b{i}" for i in range(9)], ["c1"]))
    assert "c1" in many
    assert "b8" not in many


def test_a_submodule_has_the_report_of_the_full_model(saved):
    root, wanted = saved
    body, head = nn.Module(), nn.Module()
    body.body, head.head = Net(seed=1).body, Net(seed=1).head
    report = WeightsReport(HEAD, BODY, BODY)
    for part in (body, head):
        before = values(part)
        assert load_weights(root, part, ["head.*"], names=BODY + HEAD) == report
        expected = wanted if part is head else before
        assert same(values(part), expected, before)


def on_ranks(root, wanted):
    model = Net(seed=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.body[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = [t.full_tensor().clone() for t in model.parameters()]
    try:
        report = load_weights(root, model)
    except CorruptCheckpoint as error:
        after = [t.full_tensor() for t in model.parameters()]
        return str(error), all(map(torch.equal, before, after))
    assert report == WeightsReport(BODY + HEAD, [], [])
    found = {name: t.full_tensor() for name, t in model.named_parameters()}
    assert same(found, wanted, found)
    return None, False


@pytest.mark.lane("quick")
@pytest.mark.distributed
def test_shards_of_ranks(saved):
    run_on_ranks(3, on_ranks, str(saved[0]), saved[1])


class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2**20))  # a block of 4 MiB for each row


def a_block_of_one_rank(root):
    model = Big()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    try:
        load_weights(root, model)
    except CorruptCheckpoint as error:
        return str(error), model.weight.full_tensor().abs().max().item()
    return None, model.weight.full_tensor().min().item()


@pytest.mark.lane("quick")
@pytest.mark.distributed
def test_damage_that_one_rank_sees_stops_all(tmp_path):
    model = Big()
    nn.init.ones_(model.weight)
    with Store(tmp_path) as store:
        store.save(1, {"model": model})
    assert run_on_ranks(2, a_block_of_one_rank, str(tmp_path)) == [(None, 1.0)] * 2
    with open(tmp_path / "step-00000001" / "data-0.bin", "r+b") as file:
        file.seek(3 * 2**22 + 5)
        file.write(b"\xff")
    for text, largest in run_on_ranks(2, a_block_of_one_rank, str(tmp_path)):
        assert "rank 1: " in text
        assert "block 3" in text
        assert largest == 0.0

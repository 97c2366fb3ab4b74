"""Reversible maps: every operation both ways, the streaming order, and each refusal."""

import pytest
import torch

from forge_ckpt.hf import check_rows, to_forge, to_hf
from forge_testing.problems import ANY, assert_problem, rejects

pytestmark = pytest.mark.lane("test")


def _tensor(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


CASES = {
    "rename": (("a.{i}.w", "b.{i}.v", ()), {"a.0.w": (2, 3), "a.11.w": (2, 3)}),
    "transpose": (("a.w", "b.w", (("transpose", 0, 1),)), {"a.w": (2, 3)}),
    "concat": (
        (("l.{i}.gate", "l.{i}.up"), "l.{i}.gate_up", (("concat", 0, 2),)),
        {"l.0.gate": (4, 3), "l.0.up": (4, 3)},
    ),
    "concat_sizes": (
        (("q", "k", "v"), "qkv", (("concat", 0, (8, 2, 2)),)),
        {"q": (8, 3), "k": (2, 3), "v": (2, 3)},
    ),
    "split": (("l.{i}.qkv", ("l.{i}.q", "l.{i}.k"), (("split", 0, (6, 2)),)), {"l.3.qkv": (8, 3)}),
    "split_evenly": (("gate_up", ("gate", "up"), (("split", 1, 2),)), {"gate_up": (3, 8)}),
    "stack": (
        ("l.{i}.e.{e}.w", "l.{i}.experts", (("stack_experts", 3),)),
        {f"l.4.e.{e}.w": (2, 5) for e in range(3)},
    ),
    "experts_renamed": (
        ("l.{i}.e.{e}.w", "l.{i}.x.{e}.w", ()),
        {f"l.4.e.{e}.w": (2, 5) for e in range(3)},
    ),
    "concat_stack_transpose": (
        (
            ("e.{e}.gate", "e.{e}.up"),
            "experts.gate_up",
            (("concat", 0, 2), ("stack_experts", 2), ("transpose", 1, 2)),
        ),
        {f"e.{e}.{n}": (3, 5) for n in ("up", "gate") for e in (1, 0)},
    ),
    "rope": (("q", "q2", (("rope_permute", 2),)), {"q": (12, 5)}),
    "rope_bias": (("q", "q2", (("rope_permute", 2),)), {"q": (12,)}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bit_equal(case, dtype):
    row, shapes = CASES[case]
    tensors = {n: _tensor(*s, dtype=dtype, seed=i) for i, (n, s) in enumerate(shapes.items())}
    ours = dict(to_forge([row], tensors.items()))
    back = dict(to_hf([row], ours.items()))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert all(t.is_contiguous() for t in (*ours.values(), *back.values()))


def test_operations_do_what_their_names_state():
    row, shapes = CASES["concat_stack_transpose"]
    tensors = {n: _tensor(*s, seed=i) for i, (n, s) in enumerate(shapes.items())}
    ours = dict(to_forge([row], tensors.items()))["experts.gate_up"]
    want = [torch.cat([tensors[f"e.{e}.gate"], tensors[f"e.{e}.up"]]).T for e in range(2)]
    assert torch.equal(ours, torch.stack(want))


def test_a_split_is_the_concat_of_the_other_side():
    row, shapes = CASES["split"]
    (name, whole), *_ = ((n, _tensor(*s)) for n, s in shapes.items())
    ours = dict(to_forge([row], [(name, whole)]))
    assert torch.equal(ours["l.3.q"], whole[:6])
    assert torch.equal(ours["l.3.k"], whole[6:])
    assert len({t.untyped_storage().data_ptr() for t in (whole, *ours.values())}) == 3
    joined = to_hf([row], [("l.3.k", ours["l.3.k"]), ("l.3.q", ours["l.3.q"])])
    assert torch.equal(dict(joined)[name], whole)
    for tensors, key, value, code in (
        ([("l.3.k", ours["l.3.k"])], "l.3.qkv", ["l.3.q"], "missing"),
        ([("l.3.q", whole), ("l.3.k", ours["l.3.k"])], "l.3.qkv", (8, 2), "sizes"),
        ([("l.3.k", whole), ("l.3.k", whole)], "l.3.k", ..., "repeated"),
    ):
        with rejects(key, value, code):
            list(to_hf([row], tensors))
    with rejects(name, ..., "error", where="('concat', 0, (6, 2))"):
        list(to_forge([row], [(name, torch.zeros(7, 3))]))
    with rejects(name, ..., "duplicate"):
        list(to_forge([row], [(name, whole), (name, whole)]))


def test_rope_permute_keeps_the_rotation():
    """Rotating halves of the HF rows equals rotating neighbouring pairs of ours."""
    heads, dim = 2, 6
    x = _tensor(heads * dim, 1)
    ours = dict(to_forge([("q", "q", (("rope_permute", heads),))], [("q", x)]))["q"]
    for head in range(heads):
        block = x[head * dim : (head + 1) * dim, 0]
        pairs = torch.stack([block[: dim // 2], block[dim // 2 :]], dim=1).flatten()
        assert torch.equal(ours[head * dim : (head + 1) * dim, 0], pairs)


def test_a_tensor_leaves_as_soon_as_its_parts_are_there():
    row, _ = CASES["concat"]
    names = ["l.0.gate", "l.1.gate", "l.1.up", "l.0.up"]
    taken = []

    def source():
        for name in names:
            taken.append(name)
            yield name, torch.zeros(2, 2)

    stream = to_forge([row], source())
    assert next(stream)[0] == "l.1.gate_up"
    assert taken == names[:3]
    assert next(stream)[0] == "l.0.gate_up"


def test_exported_parts_own_their_memory():
    row, _ = CASES["concat"]
    parts = dict(to_hf([row], [("l.0.gate_up", torch.zeros(4, 2))]))
    pointers = {t.untyped_storage().data_ptr() for t in parts.values()}
    assert len(pointers) == 2


@pytest.mark.parametrize(
    ("row", "tensors", "key", "value", "code"),
    [
        ("rename", [("other", (1,))], "other", ..., "unknown"),
        ("rename", [("a.01.w", (1,))], "a.01.w", ..., "unknown"),
        ("rename", [("a.1.w", (1,)), ("a.1.w", (1,))], "a.1.w", ..., "repeated"),
        ("concat", [("l.0.up", (2, 2))], "l.0.gate_up", ["l.0.gate"], "missing"),
        ("concat", [("l.0.up", (2, 2)), ("l.0.gate", (3, 2))], "l.0.gate_up", (3, 2), "sizes"),
        ("stack", [("l.4.e.3.w", (2, 5))], "l.4.e.3.w", 3, "expert"),
        ("rope", [("q", (5, 2))], "q2", 5, "heads"),
        ("transpose", [("a.w", (5,))], "b.w", ..., "error"),
    ],
)
def test_errors_name_the_tensor(row, tensors, key, value, code):
    with rejects(key, value, code):
        list(to_forge([CASES[row][0]], [(name, torch.zeros(shape)) for name, shape in tensors]))


def test_the_inverse_conversion_rejects_them_too():
    for case, name, shape, value, code in [
        ("rename", "x", (1,), ..., "unknown"),
        ("concat", "l.0.gate_up", (3, 2), (3, 2), "divides"),
        ("stack", "l.0.experts", (2, 2, 2), (2, 2, 2), "experts"),
    ]:
        with rejects(name, value, code):
            list(to_hf([CASES[case][0]], [(name, torch.zeros(shape))]))


def test_ambiguous_name_names_both_rows():
    rows = [("a.{i}.w", "b.{i}", ()), ("a.0.w", "c", ())]
    with rejects("a.0.w", 2, "ambiguous"):
        list(to_forge(rows, [("a.0.w", torch.zeros(1))]))


BAD_ROWS = [
    (("a.{i}", "b", ()), "{i}", "layer"),
    (("c", "d", (("flip", 1),)), "flip", "unknown"),
    (("e.{x}", "f.{x}", ()), "e.{x}", "field"),
    ((("g", "h"), "gh", ()), 2, "concat"),
    (("k.{e}", "k", ()), "{e}", "stack_experts"),
    (("m", "n", (("transpose", 1),)), ("transpose", 1), "length"),
    (("m", "o", ()), "hf m", "duplicate"),
    (("p", ("q", "r"), ()), 2, "forge_patterns"),
    ((("s", "t"), ("u", "v"), (("split", 0, 2),)), (("split", 0, 2),), "split"),
    (("w", ("x", "y"), (("split", 0, 2), ("transpose", 0, 1))), ANY, "split"),
    (("z", ("zz", "zzz"), (("split", 0, 3),)), 2, "concat"),
    (("A.{i}.{i}", "B.{i}", ()), "A.{i}.{i}", "twice"),
    ((("C.{e}", "D"), "E", (("concat", 0, 2),)), "{e}", "some_experts"),
    (("F", "G.{e}", ()), "{e}", "forge_experts"),
    (("H", "I", (("transpose", 0, "1"),)), ("transpose", 0, "1"), "type"),
    (("J", "K", (("rope_permute", 0),)), ("rope_permute", 0), "range"),
]


def test_all_bad_rows_are_reported_at_once():
    with rejects("rows.0", "{i}", "layer") as caught:
        check_rows([row for row, _, _ in BAD_ROWS])
    for number, (_, value, code) in enumerate(BAD_ROWS):
        assert_problem(caught.value, f"rows.{number}", value, code)

"""Batches of pictures or of text alone: the order of LLaVA, the same for any reader."""

import contextlib
import io
import json
import random
from types import SimpleNamespace

import pytest

from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
Loader = pytest.importorskip("forge_data").Loader

from forge_vlm.data import VisionChatSource, open_source  # noqa: E402
from forge_vlm.data.packing import grouped_order  # noqa: E402
from forge_vlm.data.prepare import prepare  # noqa: E402
from forge_vlm.data.source import options_of  # noqa: E402

OPTIONS = dict(resolution={"fixed": {"size": 8}}, tokens_per_tile=4, template="plain", pack=False)


def talks(folder, count=50):
    """Every third conversation has no picture; lengths differ."""
    lines = []
    for i in range(count):
        parts = [{"type": "text", "text": "see"}]
        if i % 3:
            file = io.BytesIO()
            Image.new("RGB", (8, 8), (i, 0, 0)).save(file, "PNG")
            (folder / f"{i}.png").write_bytes(file.getvalue())
            parts.append({"type": "image", "image": f"{i}.png"})
        answer = "x" * (1 + i * 7 % 11)
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    (folder / "talks.jsonl").write_text("\n".join(lines))
    return folder / "talks.jsonl"


@pytest.mark.parametrize("seed", range(20))
def test_batches_are_of_one_kind_and_every_row_is_there_once(seed):
    rng = random.Random(seed)
    count, size = rng.randint(1, 200), rng.randint(1, 16)
    lengths = np.array([rng.randint(1, 30) for _ in range(count)])
    pictured = np.array([rng.random() < 0.7 for _ in range(count)])
    orders = [grouped_order(lengths, pictured, size, seed, epoch) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(count))
        whole = sum(int(part.sum()) // size for part in (pictured, ~pictured))
        for first in range(0, whole * size, size):
            batch = order[first : first + size]
            assert len(set(pictured[batch].tolist())) == 1
            assert lengths[batch].tolist() == sorted(lengths[batch].tolist(), reverse=True)
        rest = order[whole * size :]
        assert all(int(part[rest].sum()) < size for part in (pictured, ~pictured))
    if count > 20:
        assert orders[0].tolist() != orders[1].tolist()
        again = grouped_order(lengths, pictured, size, seed, 0)
        assert again.tolist() == orders[0].tolist()


def test_batches_come_in_any_order_of_kinds():
    """Not all of one kind first: a run would see text alone for a while."""
    pictured = np.arange(4000) % 2 == 0
    order = grouped_order(np.ones(4000, np.int64), pictured, 10, 0, 0)
    kinds = pictured[order[::10]]
    assert 120 < np.abs(np.diff(kinds.astype(int))).sum() < 280  # of 399; 200 by chance


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_read_these_batches_and_go_on_in_their_middle(tmp_path, world):
    """The rows of each step are those of one reader that nobody stopped, and have pictures in all of them or in none."""
    source = VisionChatSource(talks(tmp_path), **OPTIONS, group=6)
    with contextlib.closing(Loader(source.stream(24, 1), 6)) as alone:
        wanted = [rows_of(next(alone)) for _ in range(7)]
    found = [[] for _ in wanted]
    for rank in range(world):
        loader = Loader(source.stream(24, 1), 6, rank, world)
        for step in range(7):
            if step == 3:
                state = loader.state_dict()
                loader.close()
                loader = Loader(source.stream(24, 1), 6, rank, world)
                loader.load_state_dict(state)
            found[step] += rows_of(next(loader))
        loader.close()
    assert [sorted(rows) for rows in found] == [sorted(rows) for rows in wanted]
    assert all(len({pictured for *_, pictured in rows}) == 1 for rows in found)
    assert len({rows[0][-1] for rows in found}) == 2  # batches of both kinds are among them


def rows_of(batch):
    """(instance, tokens, whether it has a picture) of the rows that are no filler."""
    images = batch.extras["images"].row_offsets.diff()
    return [
        (instance, batch.tokens[row].tolist(), bool(images[row]))
        for row, instance in enumerate(batch.instance_ids.tolist())
        if instance >= 0
    ]


def test_a_prepared_folder_draws_the_same_batches(tmp_path):
    path = talks(tmp_path)
    source = VisionChatSource(path, **OPTIONS, group=4)
    prepare(str(path), tmp_path / "out", options_of(str(path), OPTIONS))
    folder = open_source(SimpleNamespace(path=str(tmp_path / "out"), split="train"), group=4)
    streams = [s.stream(24, 3) for s in (source, folder)]
    order = [[int(s.samples_of(i)[0]) for i in range(100)] for s in streams]
    assert order[0] == order[1]
    plain = VisionChatSource(path, **OPTIONS).stream(24, 3)
    assert order[0] != [int(plain.samples_of(i)[0]) for i in range(100)]
    assert streams[0].fingerprint() != plain.fingerprint()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"group": 4, "pack": True}, "excludes"),
        ({"group": 0}, "size"),
        ({"group": 4, "streaming": True}, "streaming"),
    ],
)
def test_settings_that_cannot_be_grouped_are_rejected(tmp_path, options, code):
    config = SimpleNamespace(path=str(talks(tmp_path)), split="train")
    with rejects("group", options["group"], code):
        open_source(config, **{**OPTIONS, **options})

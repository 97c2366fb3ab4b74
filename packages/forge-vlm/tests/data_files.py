"""Files of each format with pictures of four colours, which tests write."""

import base64
import csv
import io
import json
import tarfile

import pytest

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
NAMES = list(COLOURS)
OPTIONS = dict(resolution={"fixed": {"size": 8}}, tokens_per_tile=4)
EOS, IMAGE = 256, 257


def png(colour, size=(8, 8)):
    file = io.BytesIO()
    Image.new("RGB", size, COLOURS[colour]).save(file, "PNG")
    return file.getvalue()


def picture_files(folder):
    (folder / "p").mkdir(parents=True)
    for name in NAMES:
        (folder / "p" / f"{name}.png").write_bytes(png(name))


def chat(folder):
    """Two questions about one picture, one about two, one without."""
    picture_files(folder)
    data = "data:image/png;base64," + base64.b64encode(png("blue")).decode()
    records = [
        [
            ("user", [("image", "p/red.png"), ("text", "what?")]),
            ("assistant", "red"),
            ("user", "sure?"),
            ("assistant", "yes"),
        ],
        [
            ("user", [("text", "a "), ("image", data), ("text", " b "), ("image", "p/green.png")]),
            ("assistant", "blue and green"),
        ],
        [("system", "be short"), ("user", "hello"), ("assistant", "hi")],
    ]
    lines = []
    for record in records:
        messages = []
        for role, content in record:
            if not isinstance(content, str):
                content = [{"type": kind, kind: value} for kind, value in content]
            messages.append({"role": role, "content": content})
        lines.append(json.dumps({"messages": messages}))
    (folder / "talks.jsonl").write_text("\n".join(lines))
    return folder / "talks.jsonl"


def llava(folder):
    picture_files(folder)
    records = [
        {
            "id": "a",
            "image": f"p/{name}.png",
            "conversations": [
                {"from": "human", "value": "<image>\ncolour?"},
                {"from": "gpt", "value": name},
            ],
        }
        for name in NAMES
    ]
    (folder / "llava.json").write_text(json.dumps(records))
    return folder / "llava.json"


def coco(folder):
    picture_files(folder)
    images = [{"id": i, "file_name": f"p/{name}.png"} for i, name in enumerate(NAMES)]
    notes = [{"image_id": i, "caption": name} for i, name in enumerate(NAMES)]
    (folder / "captions.json").write_text(json.dumps({"images": images, "annotations": notes}))
    return folder / "captions.json"


def folder_of_csv(folder):
    picture_files(folder)
    with (folder / "metadata.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("file_name", "text"), *((f"p/{n}.png", n) for n in NAMES)])
    return folder


def folder_of_lines(folder):
    picture_files(folder)
    lines = [json.dumps({"file_name": f"p/{n}.png", "caption": n}) for n in NAMES]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def parquet(folder):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"image": [png(n) for n in NAMES], "text": NAMES})
    folder.mkdir(exist_ok=True)
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "a.parquet")
    return folder


def dataset(folder):
    datasets = pytest.importorskip("datasets")
    talks = [
        [
            {
                "role": "user",
                "content": [{"type": "image", "text": None}, {"type": "text", "text": "?"}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": n}]},
        ]
        for n in NAMES
    ]
    rows = {"images": [[Image.open(io.BytesIO(png(n)))] for n in NAMES], "messages": talks}
    datasets.Dataset.from_dict(rows).cast_column(
        "images", datasets.List(datasets.Image())
    ).save_to_disk(folder / "set")
    return folder / "set"


def webdataset(folder):
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / "a.tar", "w") as tar:
        for i, name in enumerate(NAMES):
            for ending, content in (("png", png(name)), ("txt", name.encode())):
                member = tarfile.TarInfo(f"x/{i:04}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return folder

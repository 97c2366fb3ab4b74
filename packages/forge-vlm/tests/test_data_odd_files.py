"""Files that are legal and seldom: many pictures of a sample, tables of spreadsheets, 16 bits of grey."""

import io
import json
import tarfile

import pytest

pytestmark = pytest.mark.lane("test")

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from forge_vlm.data.formats import open_records  # noqa: E402
from forge_vlm.resolution import ResolutionConfig, build_resolution  # noqa: E402


def png(red):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (red, 0, 0)).save(file, "PNG")
    return file.getvalue()


def test_images_of_a_tar_are_in_the_order_of_their_numbers(tmp_path):
    members = {f"s.{i}.png": png(i) for i in range(12)}
    members["s.json"] = json.dumps({"texts": ["look", *[None] * 12]}).encode()
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    pictures = open_records("webdataset", tmp_path / "a.tar")[0].pictures
    reds = [Image.open(io.BytesIO(picture.read())).getpixel((0, 0))[0] for picture in pictures]
    assert reds == list(range(12))


@pytest.mark.parametrize(
    ("table", "caption"),
    [
        ('file_name,text\r\na.png,"one\r\ntwo"\r\n', "one\r\ntwo"),
        ("file_name,text\na.png,one\u2028two\n", "one\u2028two"),
        ("\ufefffile_name,text\na.png,one\n", "one"),
    ],
    ids=["a quoted line break", "a line separator of Unicode", "a byte order mark"],
)
def test_a_table_keeps_its_captions(table, caption, tmp_path):
    (tmp_path / "a.png").write_bytes(png(0))
    (tmp_path / "metadata.csv").write_bytes(table.encode())
    records = open_records("folder", tmp_path)
    assert [record.messages[1].parts for record in records] == [(caption,)]


def test_grey_of_16_bits_keeps_its_shades():
    eight = np.tile(np.arange(0, 256, 4, dtype=np.uint8), (64, 1))
    resolution = build_resolution(ResolutionConfig("fixed"))
    deep = resolution(Image.fromarray(eight.astype(np.uint16) * 257))
    assert deep.equal(resolution(Image.fromarray(eight)))

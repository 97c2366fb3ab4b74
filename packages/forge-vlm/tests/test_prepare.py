"""A prepared folder and kept lengths: the rows of the files themselves, complete or not at all, opened without reading."""

import errno
import json
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch

from forge_testing.damages import without_locks
from forge_testing.durability import synced_renames
from forge_testing.problems import rejects
from forge_testing.processes import exit_code, forked

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from data_files import OPTIONS, chat, llava, png, webdataset  # noqa: E402

from forge_vlm.data import InvalidSample, VisionChatSource, open_source  # noqa: E402
from forge_vlm.data import index as index_module  # noqa: E402
from forge_vlm.data import prepare as prepare_module  # noqa: E402
from forge_vlm.data.command import main, run  # noqa: E402
from forge_vlm.data.prepare import prepare  # noqa: E402
from forge_vlm.data.prepared import MANIFEST, Prepared, verify  # noqa: E402
from forge_vlm.data.source import options_of  # noqa: E402

pytestmark = pytest.mark.lane("test")


def talks_of(folder, count=10):
    """Conversations of 0 to 2 pictures of one colour that is their number."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(count):
        parts = [{"type": "text", "text": "see"}]
        for j in range(i % 3):
            Image.new("RGB", (8, 8), (i, j, 0)).save(folder / f"{i}-{j}.png")
            parts.append({"type": "image", "image": f"{i}-{j}.png"})
        answer = {"role": "assistant", "content": "x" * (1 + i % 7), "weight": 1 + i % 2}
        lines.append(json.dumps({"messages": [{"role": "user", "content": parts}, answer]}))
    (folder / "talks.jsonl").write_text("\n".join(lines))
    return folder / "talks.jsonl"


def same_rows(one, other, seq_len=800):
    """All arrays and media of an epoch, and what a resume compares."""
    first, second = (source.stream(seq_len, seed=3) for source in (one, other))
    assert first.fingerprint() == second.fingerprint()
    assert first.warnings == second.warnings
    wanted, found = (s.arrays(np.arange(len(s))) for s in (first, second))
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        if hasattr(value, "row_offsets"):
            assert torch.equal(value.values, found[name].values), name
            assert torch.equal(value.row_offsets, found[name].row_offsets), name
        else:
            assert (value == found[name]).all(), name


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(prepare_module, "UNIT", 3)


def prepared(path, output, workers=1, pictures="copy", **options):
    given = options_of(str(path), {**OPTIONS, **options})
    return prepare(path, output, given, workers=workers, pictures=pictures)


@pytest.mark.parametrize("pictures", ["copy", "name"])
def test_a_prepared_folder_has_the_rows_of_its_files(tmp_path, pictures):
    path = talks_of(tmp_path / "a")
    about = prepared(path, tmp_path / "out", pictures=pictures, weigh="sqrt")
    same_rows(VisionChatSource(path, weigh="sqrt", **OPTIONS), Prepared(tmp_path / "out"))
    assert (about["samples"], about["counts"]["pictures"]) == (10, 9)
    assert not (tmp_path / "out.parts").exists()
    assert verify(tmp_path / "out") == about
    if pictures == "copy":  # it stands alone
        for file in (tmp_path / "a").iterdir():
            file.unlink()
        Prepared(tmp_path / "out").stream(400).arrays(np.arange(1))


@pytest.mark.parametrize("pictures", ["copy", "name"])
def test_F197_files_are_on_the_disk_before_their_folder_is_published(tmp_path, pictures):
    path = talks_of(tmp_path / "a")
    with synced_renames() as moved:
        prepared(path, tmp_path / "out", pictures=pictures)
        prepare(path, tmp_path / "out", options_of(str(path), OPTIONS), overwrite=True)
    assert moved.count("out") == 2


@pytest.mark.parametrize("name", ["llava", "webdataset", "tiles", "budget"])
def test_formats_and_resolutions(tmp_path, name):
    options = {**OPTIONS, "format": name if name in ("llava", "webdataset") else "chat"}
    path = {"llava": llava, "webdataset": webdataset}.get(name, chat)(tmp_path)
    if name == "tiles":
        options["resolution"] = {"name": "tiles", "tiles": {"tile_size": 8, "longest_edge": 16}}
    if name == "budget":
        options |= {"tokens_per_tile": None, "patch_size": 2, "positions": "sequential"}
        budget = {"multiple": 4, "min_pixels": 16, "max_pixels": 256}
        options["resolution"] = {"name": "budget", "budget": budget}
    prepare(path, tmp_path / "out", options_of(str(path), options))
    same_rows(VisionChatSource(path, **options), Prepared(tmp_path / "out"))


@pytest.mark.parametrize("weights", [(1, 1), (1, 2), (2, 2)])
def test_one_label_with_another_weight_makes_a_folder_weighted(tmp_path, weights):
    talk = []
    for weight in weights:
        talk.append({"role": "user", "content": "more"})
        talk.append({"role": "assistant", "content": "one", "weight": weight})
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}))
    assert prepared(tmp_path / "a.jsonl", tmp_path / "out")["weighted"] == (max(weights) > 1)
    same_rows(VisionChatSource(tmp_path / "a.jsonl", **OPTIONS), Prepared(tmp_path / "out"))


def test_branches_of_a_record(tmp_path):
    ask = {"role": "user", "content": "name two"}
    answers = [[{"role": "assistant", "content": text}] for text in ("one", "two")]
    record = {"messages": [ask], "branches": answers}
    plain = {"messages": [ask, *answers[0]]}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(record)}\n{json.dumps(plain)}\n")
    assert prepared(tmp_path / "a.jsonl", tmp_path / "out")["branched"]
    source = VisionChatSource(tmp_path / "a.jsonl", **OPTIONS)
    assert source.stream(400).arrays(np.arange(1))["branch_ids"].max() == 2
    same_rows(source, Prepared(tmp_path / "out"))


def test_frames_of_a_video(tmp_path):
    av = pytest.importorskip("av")
    with av.open(tmp_path / "clip.mkv", "w") as container:
        stream = container.add_stream("ffv1", rate=4)
        stream.width = stream.height = 16
        stream.pix_fmt = "bgr0"
        for i in range(8):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 20 * i, np.uint8), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    part = {"type": "video", "video": "clip.mkv"}
    talk = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "it grows"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}))
    prepared(tmp_path / "a.jsonl", tmp_path / "out", video={"fps": 2.0})
    (source := VisionChatSource(tmp_path / "a.jsonl", video={"fps": 2.0}, **OPTIONS)).stream(400)
    same_rows(source, Prepared(tmp_path / "out"))
    assert len(Prepared(tmp_path / "out").sample(0).pictures) == 4
    assert source.sample(0).clips == Prepared(tmp_path / "out").sample(0).clips


@pytest.mark.parametrize("corrupt", ["mask", "skip", "raise"])
def test_damaged_images_are_counted_by_cause(tmp_path, corrupt):
    path = talks_of(tmp_path / "a")
    (tmp_path / "a/1-0.png").unlink()
    (tmp_path / "a/2-1.png").write_bytes((tmp_path / "a/2-1.png").read_bytes()[:45])
    if corrupt == "raise":
        with rejects("", ..., "unreadable", InvalidSample, where="1-0.png"):
            prepared(path, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    about = prepared(path, tmp_path / "out", corrupt=corrupt)
    counts = about["counts"]
    assert (counts["missing"], counts["damaged"]) == (1, 1)
    if corrupt == "mask":
        assert (counts["masked"], about["samples"]) == (2, 10)
        same_rows(VisionChatSource(path, corrupt="mask", **OPTIONS), Prepared(tmp_path / "out"))
    else:
        assert (counts["left_out"], about["samples"]) == (2, 8)
        stream = Prepared(tmp_path / "out").stream(400)
        assert re.findall("[0-9]+", stream.warnings[0]) == ["2", "10"]
        assert (stream.arrays(np.arange(len(stream)))["labels"] != -100).any()


@pytest.mark.slow
def test_workers_write_the_same_bytes(tmp_path):
    path = talks_of(tmp_path / "a")
    one, two = prepared(path, tmp_path / "one"), prepared(path, tmp_path / "two", workers=2)
    assert one == two


def killed(command, where, name, after):
    """Run a command in a process of its own that is killed in the call of `where.name` behind the first `after`."""
    pid = os.fork()
    if not pid:
        real, left = getattr(where, name), [after]

        def call(*arguments, **keywords):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **keywords)

        setattr(where, name, call)
        try:
            main(command)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def command_of(path, out):
    options = ("tokens_per_tile=4", "resolution.fixed.size=8")
    flags = [flag for option in options for flag in ("--option", option)]
    return ["prepare", str(path), "--output", str(out), *flags]


@pytest.mark.parametrize(
    ("where", "name", "after", "units"),
    [
        (prepare_module, "_write_unit", 0, 0),
        (prepare_module, "_write_unit", 2, 2),
        (os, "fsync", 3, 1),
        (os, "fsync", 12, 4),
        (prepare_module, "install_folder", 0, 4),
        (Path, "rename", 0, 4),
    ],
)
def test_a_kill_leaves_nothing_and_the_same_command_goes_on(tmp_path, where, name, after, units):
    path, out = talks_of(tmp_path / "a"), tmp_path / "out"
    command = command_of(path, out)
    killed(command, where, name, after)
    assert not out.exists()
    assert len([*(tmp_path / "out.parts").glob("unit-*")]) == units
    assert main(command) == 0
    same_rows(VisionChatSource(path, **OPTIONS), Prepared(out))
    assert main(command) == 78  # it is there
    assert main([*command, "--overwrite"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "out"]


@pytest.mark.lane("quick")
def test_F162_three_processes_replace_one_output_one_after_another(tmp_path, monkeypatch):
    """A lock that goes with the folder of parts keeps out neither who waits for it nor who comes later."""
    path, out, log = talks_of(tmp_path / "a"), tmp_path / "out", tmp_path / "log"
    write_units = prepare_module._write_units

    def slow(*arguments):
        with log.open("a") as file:
            file.write("in ")
        write_units(*arguments)
        time.sleep(0.3)
        with log.open("a") as file:
            file.write("out ")

    monkeypatch.setattr(prepare_module, "_write_units", slow)
    command = [*command_of(path, out), "--overwrite"]
    for _ in range(2):
        forked(lambda: os._exit(main(command)))
    assert exit_code(-1) == 0  # the first is done, and the second has the lock
    forked(lambda: os._exit(main(command)))
    assert [exit_code(-1), exit_code(-1)] == [0, 0]
    assert log.read_text().split() == ["in", "out"] * 3
    assert {p.name for p in tmp_path.iterdir()} == {"a", "log", "out"}


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_F163_a_file_system_without_locks_is_warned_of_once(tmp_path, monkeypatch, caplog, number):
    without_locks(monkeypatch, number)
    path = talks_of(tmp_path / "a")
    for name, other in (("other", {"weigh": "sqrt"}), ("out", {})):
        prepared(path, tmp_path / name)
        source, times = counted(path, monkeypatch, tmp_path, **other)
        assert times == 1
    same_rows(source, Prepared(tmp_path / "out"))
    folders = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert folders == [str(tmp_path), str(tmp_path / "cache")]


def test_chunks_of_another_plan_are_not_used(tmp_path):
    path, out = talks_of(tmp_path / "a"), tmp_path / "out"
    killed(command_of(path, out), prepare_module, "install_folder", 0)
    assert main([*command_of(path, out), "--option", "template=plain"]) == 0
    same_rows(VisionChatSource(path, template="plain", **OPTIONS), Prepared(out))


def test_a_source_of_a_job_is_prepared_and_opened_by_its_name(tmp_path, capsys):
    path = talks_of(tmp_path / "a")
    job = tmp_path / "job.toml"
    job.write_text(
        f'[data.sources.talks]\nname = "vlm"\npath = "{path}"\n[data.sources.talks.options]\n'
        "tokens_per_tile = 4\nresolution = { fixed = { size = 8 } }\n"
    )
    assert main(["prepare", str(job), "--output", str(tmp_path / "out")]) == 0
    assert "10 samples of 10 records" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "out")]) == 0

    class Config:
        path = str(tmp_path / "out")

    source = open_source(Config(), positions="text_preserving", **OPTIONS)
    wanted = VisionChatSource(path, positions="text_preserving", **OPTIONS)
    same_rows(wanted, source)
    with rejects("template", "vicuna", "mismatch", where=Config.path):
        open_source(Config(), template="vicuna")
    with rejects("cache_size", 1, "unknown_key", where=Config.path):
        open_source(Config(), cache_size=1)
    with rejects("streaming", True, "prepared"):
        open_source(Config(), streaming=True)


def test_a_damaged_folder_is_named(tmp_path):
    prepared(talks_of(tmp_path / "a"), tmp_path / "out")
    media = tmp_path / "out/media.bin"
    content = media.read_bytes()
    media.write_bytes(content[:-1])
    with rejects("", ..., "truncated", InvalidSample, where=media):
        Prepared(tmp_path / "out")
    media.write_bytes(content[:-1] + b"x")
    assert main(["verify", str(tmp_path / "out")]) == 65
    with rejects("", ..., "damaged", InvalidSample, where=media):
        verify(tmp_path / "out")
    (tmp_path / "out/prepared.json").write_text('{"version": 1}')
    with rejects("version", 1, "version", InvalidSample, where=tmp_path / "out"):
        verify(tmp_path / "out")
    (tmp_path / "out/prepared.json").write_text("{")
    with rejects("", ..., "not_json", InvalidSample, where="prepared.json"):
        verify(tmp_path / "out")


@pytest.mark.parametrize("file", ["tokens.bin", "samples.bin", "media.bin"])
def test_F172_a_missing_file_of_a_prepared_folder_is_named(tmp_path, file, capsys):
    prepared(talks_of(tmp_path / "a"), tmp_path / "out")
    missing = tmp_path / "out" / file
    missing.unlink()
    assert main(["verify", str(tmp_path / "out")]) == 65
    assert str(missing) in capsys.readouterr().err
    with rejects("", ..., "unreadable", InvalidSample, where=missing):
        verify(tmp_path / "out")
    with rejects("", ..., "truncated", InvalidSample, where=missing):
        Prepared(tmp_path / "out")


@pytest.mark.parametrize("key", ["bytes", "sha256", "given", "counts"])
def test_F172_a_manifest_without_a_key_is_no_manifest(tmp_path, key):
    about = prepared(talks_of(tmp_path / "a"), tmp_path / "out")
    manifest = tmp_path / "out" / MANIFEST
    del about[key]
    manifest.write_text(json.dumps(about))
    for call in (verify, Prepared):
        with rejects("", ..., "not_json", InvalidSample, where=manifest):
            call(tmp_path / "out")


class BrokenPool:
    """A pool of which a process was killed."""

    def __init__(self, *_):
        pass

    def map(self, *_):
        raise BrokenProcessPool("abruptly")

    def shutdown(self, **_):
        pass


def test_F172_a_killed_worker_is_reported(tmp_path, monkeypatch, capsys):
    path, out = talks_of(tmp_path / "a"), tmp_path / "out"
    monkeypatch.setattr(prepare_module, "ProcessPoolExecutor", BrokenPool)
    assert main([*command_of(path, out), "--workers", "2"]) == 65
    assert str(path) in capsys.readouterr().err
    with rejects("workers", 2, "killed", InvalidSample):
        prepared(path, out, workers=2)


@pytest.fixture
def common():
    """A folder that all users may read; those of pytest are closed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def as_another_user(command):
    """The exit code of a command of a user who may not read root's folders."""
    pid = os.fork()
    if not pid:
        try:
            if not os.geteuid():
                os.setuid(65534)
            os._exit(main(command))
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["prepare", "closed/talks.jsonl", "--output", "out"], 65),
        (["prepare", "closed", "--output", "out", "--option", "format=webdataset"], 65),
        (["prepare", "a/talks.jsonl", "--output", "closed/out"], 78),
        (["prepare", "closed/job.toml", "--output", "out"], 78),
        (["verify", "closed/out"], 65),
    ],
)
def test_F172_a_folder_that_cannot_be_read_is_named(common, command, code, capfd, monkeypatch):
    talks_of(common / "a")
    (common / "closed").mkdir()
    monkeypatch.chdir(common)
    options = ["--option", "tokens_per_tile=4"] if command[0] == "prepare" else []
    (common / "closed").chmod(0)
    try:
        assert as_another_user([*command, *options]) == code
    finally:
        (common / "closed").chmod(0o700)
    found = capfd.readouterr().err
    assert "closed" in found
    assert "Traceback" not in found


@pytest.mark.parametrize(
    ("arguments", "key", "value", "code"),
    [
        (["--option", "a"], "--option", "a", "syntax"),
        (["--option", "streaming=true"], "streaming", True, "unknown_key"),
        (["--source", "x"], "--source", "x", "requires"),
        (["--workers", "0"], "workers", 0, "range"),
        (["--option", "eos=1", "--option", "eos.a=1"], "--option", "eos.a", "excludes"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, key, value, code, capsys):
    path = talks_of(tmp_path / "a")
    command = ["prepare", str(path), "--output", str(tmp_path / "out"), *arguments]
    assert main(command) == 78
    assert key in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with rejects(key, value, code):
        run(command)


@pytest.mark.parametrize(
    ("job", "key", "value", "code"),
    [
        ("[data.sources.a]\nname = 'text'", "--source", None, "unknown"),
        ("[data", "", ..., "not_toml"),
    ],
)
def test_wrong_jobs_are_named(tmp_path, job, key, value, code):
    (tmp_path / "job.toml").write_text(job)
    with rejects(key, value, code, where="job.toml"):
        run(["prepare", str(tmp_path / "job.toml"), "--output", str(tmp_path / "out")])


def test_outputs_that_cannot_be_are_rejected(tmp_path):
    path, out = talks_of(tmp_path / "a"), tmp_path / "out"
    out.mkdir()
    with rejects("output", str(out), "exists"):
        prepared(path, out)
    with rejects("output", str(out), "foreign"):
        prepare(str(path), out, options_of(str(path), OPTIONS), overwrite=True)
    with rejects("pictures", "link", "unknown"):
        prepare(str(path), out, options_of(str(path), OPTIONS), pictures="link")
    with rejects("output", str(path / "out"), "unwritable"):
        prepared(path, path / "out")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with rejects("path", str(empty), "empty", InvalidSample):
        prepared(empty, tmp_path / "none")


def test_files_without_a_valid_image_are_rejected(tmp_path):
    path = talks_of(tmp_path / "a")
    path.write_text(path.read_text().splitlines()[1])
    (tmp_path / "a/1-0.png").write_bytes(b"none")
    with rejects("", ..., "no_sample", InvalidSample, where=path):
        prepared(path, tmp_path / "out", corrupt="skip")


def test_opening_reads_no_media_and_a_worker_gets_no_copy(tmp_path):
    prepared(talks_of(tmp_path / "a"), tmp_path / "out")
    source = Prepared(tmp_path / "out", pack=False)
    assert isinstance(source._columns["tokens"], np.memmap)
    assert len(pickle.dumps(source)) < 1000
    again = pickle.loads(pickle.dumps(source))
    same_rows(source, again)


# ---- lengths of files that are not prepared


def counted(path, monkeypatch, tmp_path, **options):
    """A source, and how many records were tokenized when it opened."""
    monkeypatch.setattr(index_module, "SMALL", 0)
    read = []
    real = index_module.count
    monkeypatch.setattr(index_module, "count", lambda *a: read.append(1) or real(*a))
    source = VisionChatSource(path, cache=str(tmp_path / "cache"), **{**OPTIONS, **options})
    monkeypatch.setattr(index_module, "count", real)
    return source, len(read)


def test_lengths_are_found_once(tmp_path, monkeypatch):
    path = talks_of(tmp_path / "a")
    first, times = counted(path, monkeypatch, tmp_path)
    second, again = counted(path, monkeypatch, tmp_path)
    assert (times, again) == (1, 0)
    same_rows(first, second)
    assert counted(path, monkeypatch, tmp_path, weigh="sqrt")[1] == 1  # other options
    path.write_text(path.read_text().replace("see", "saw"))
    assert counted(path, monkeypatch, tmp_path)[1] == 1  # another content
    for file in (tmp_path / "cache").glob("*.npz"):
        file.write_bytes(b"damaged")
    assert counted(path, monkeypatch, tmp_path)[1] == 1


def test_an_image_that_is_restored_is_counted_again(tmp_path, monkeypatch):
    path = talks_of(tmp_path / "a")
    content = (tmp_path / "a/1-0.png").read_bytes()
    (tmp_path / "a/1-0.png").unlink()
    source, _ = counted(path, monkeypatch, tmp_path, corrupt="skip")
    assert len(source.lengths) == 9
    assert counted(path, monkeypatch, tmp_path, corrupt="skip")[1] == 0
    (tmp_path / "a/1-0.png").write_bytes(content)
    source, times = counted(path, monkeypatch, tmp_path, corrupt="skip")
    assert (times, len(source.lengths)) == (1, 10)


def test_an_image_of_another_size_removes_the_cached_result(tmp_path, monkeypatch):
    path = talks_of(tmp_path / "a")
    tiles = {"resolution": {"name": "tiles", "tiles": {"tile_size": 8, "longest_edge": 32}}}
    counted(path, monkeypatch, tmp_path, **tiles)
    (tmp_path / "a/1-0.png").write_bytes(png("red", (8, 32)))
    source, times = counted(path, monkeypatch, tmp_path, **tiles)
    assert times == 0
    stream = source.stream(4000)
    with rejects("sample", code="changed", kind=InvalidSample):
        stream.arrays(np.arange(len(stream)))
    assert counted(path, monkeypatch, tmp_path, **tiles)[1] == 1


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, monkeypatch, capfd):
    path = talks_of(tmp_path / "a")
    (tmp_path / "cache").write_text("a file")
    _, times = counted(path, monkeypatch, tmp_path)
    assert times == 1
    assert str(tmp_path / "cache") in capfd.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_a_terminal_and_a_line_for_each_unit_in_logs(
    tmp_path, capsys, monkeypatch, terminal
):
    Console = pytest.importorskip("rich.console").Console
    monkeypatch.setattr(Console, "is_terminal", property(lambda self: True))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    path, out = talks_of(tmp_path / "a"), tmp_path / "out"
    assert main(command_of(path, out)) == 0
    err = capsys.readouterr().err
    assert ("\x1b[" in err) is terminal
    assert (err.count("units") > 0) is not terminal

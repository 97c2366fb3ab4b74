"""Videos as frames: which are taken, that they are the file's, formats, damage."""

import io
import json
import re
import struct
from fractions import Fraction

import pytest
import torch

from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

np = pytest.importorskip("numpy")
av = pytest.importorskip("av")
Image = pytest.importorskip("PIL.Image")

from forge_vlm.data import InvalidSample, Prompts, VisionChatSource  # noqa: E402
from forge_vlm.data.records import EncodedImage  # noqa: E402
from forge_vlm.data.video import Clip, VideoConfig, at_rate, best, score_of, spread  # noqa: E402

IMAGE = 257


def write(path, times, size=(32, 48), gop=4, values=None, codec="libx264"):
    """A clip whose frame i is grey 8 (i + 1), shown at times[i] milliseconds; with frames between key frames, in both directions."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        best = {"crf": "0"} if codec == "libx264" else {"qmin": "1", "qmax": "1"}
        stream.options = {**best, "g": str(gop), "bf": "2"}
        for i, time in enumerate(times):
            value = 8 * (i + 1) if values is None else values[i]
            pixels = np.full((*size, 3), value, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def clip_of(path):
    return Clip(EncodedImage(path.name, path))


def grey(content):
    """To the next 8: colours of video are rounded."""
    return round(float(np.asarray(Image.open(io.BytesIO(content))).mean()) / 8) * 8


# ------------------------------------------------------------ which frames


@pytest.mark.parametrize("fps", [0.3, 1.0, 2.0, 7.0, 100.0])
def test_candidates_are_what_is_shown_at_each_point(fps):
    rng = np.random.default_rng(int(fps * 10))
    times = np.cumsum(rng.uniform(0.02, 0.9, 30))
    wanted, k = [], 0
    while times[0] + k / fps <= times[-1] + 1e-9:
        shown = max(i for i, t in enumerate(times) if t <= times[0] + k / fps + 1e-6)
        wanted += [shown] if shown not in wanted else []
        k += 1
    assert at_rate(times, fps).tolist() == wanted
    assert at_rate(times[:1], fps).tolist() == [0]


def test_sampled_frames_are_the_middles_of_segments_or_reach_both_ends():
    assert spread(5, 8).tolist() == [0, 1, 2, 3, 4]
    assert spread(12, 4).tolist() == [1, 4, 7, 10]
    assert spread(9, 1).tolist() == [4]
    for count in range(3, 40):
        for most in range(2, count):
            for ends in (True, False):
                found = spread(count, most, ends=ends)
                assert len(set(found.tolist())) == most
                assert (np.diff(found) > 0).all()
                assert 0 <= found[0] <= found[-1] < count
                assert not ends or (found[0], found[-1]) == (0, count - 1)
                assert np.ptp(np.diff(found)) <= 1
    assert best(np.array([1.0, 5.0, 5.0, 0.0, 7.0]), 3).tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    ("options", "key", "code"),
    [
        ({"sampling": "random"}, "sampling", "unknown"),
        ({"fps": 0}, "fps", "range"),
        ({"max_frames": 0}, "max_frames", "size"),
        ({"sampling": "first_last", "max_frames": 1}, "max_frames", "ends"),
        ({"score": "a:b"}, "score", "foreign"),
        ({"sampling": "top_k", "score": "best"}, "score", "unknown"),
    ],
)
def test_impossible_arguments_are_rejected(options, key, code):
    with rejects(key, options[key], code):
        VideoConfig(**options)


def test_a_score_without_a_path_is_rejected():
    with rejects("video.score", "none:a", "import"):
        score_of("none:a")


# ------------------------------------------------------------ their pixels


@pytest.mark.parametrize("gop", [1, 4, 100])
def test_frames_are_those_that_were_written(gop, tmp_path):
    """Uneven times, frames that refer to later ones; one pass that leaves out what it need not decode."""
    times = np.cumsum([0, 40, 40, 200, 10, 90, 500, 40, 40, 40, 300, 70]).tolist()
    clip = clip_of(write(tmp_path / "a.mp4", times, gop=gop))
    np.testing.assert_allclose(clip.times, np.array(times) / 1000, atol=1e-3)
    assert clip.size == (32, 48)
    for sampling in ("uniform", "first_last"):
        for most in (2, 3, 5, 12):
            chosen = clip.choose(VideoConfig(sampling, fps=200.0, max_frames=most))
            assert len(chosen) == most
            values = [grey(clip.frame(i)) for i in range(most)]
            assert values == [8 * (number + 1) for number in chosen]


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
@pytest.mark.parametrize("ending", ["avi", "flv", "mkv", "ts"])
def test_containers_that_seek_otherwise_lose_no_frame(codec, ending, tmp_path):
    if (codec, ending) == ("mpeg4", "flv"):
        pytest.skip("FLV holds no MPEG-4 part 2")
    path = write(tmp_path / f"a.{ending}", range(0, 1200, 100), gop=3, codec=codec)
    for most in (1, 4, 12):
        clip = clip_of(path)
        chosen = clip.choose(VideoConfig("uniform", fps=200.0, max_frames=most))
        values = [grey(clip.frame(i)) for i in range(len(chosen))]
        assert values == [8 * (number + 1) for number in chosen]
    # with frames that refer to later ones AVI has no time for one of them
    assert len(clip.times) == 12 - (ending == "avi")


def test_the_frames_with_the_highest_scores_are_taken_in_order_of_time(tmp_path):
    values = [8, 8, 200, 200, 200, 16, 16, 88, 88, 88]
    clip = clip_of(write(tmp_path / "a.mp4", range(0, 1000, 100), values=values))
    chosen = clip.choose(VideoConfig("top_k", fps=10.0, max_frames=4))
    assert chosen.tolist() == [0, 2, 5, 7]
    assert [grey(clip.frame(i)) for i in range(4)] == [8, 200, 16, 88]
    own = VideoConfig("top_k", fps=10.0, max_frames=2, score=f"{__name__}:darkness")
    assert clip.choose(own).tolist() == [0, 1]
    with rejects("video.score", f"{__name__}:wrong", "shape"):
        clip.choose(VideoConfig("top_k", fps=10.0, max_frames=2, score=f"{__name__}:wrong"))


def darkness(thumbnails):
    assert thumbnails.shape[1:] == (64, 64, 3)
    return -thumbnails.astype(float).mean((1, 2, 3))


def wrong(thumbnails):
    return 1.0


def test_a_clip_that_is_shown_rotated_is_rotated(tmp_path):
    """A telephone held upright: the file's matrix turns what was recorded a quarter to the right."""
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        pixels = np.zeros((32, 48, 3), np.uint8)
        pixels[:, :24] = 240  # the left is light
        container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    content = path.read_bytes()
    one = 1 << 16
    plain = struct.pack(">9i", one, 0, 0, 0, one, 0, 0, 0, 1 << 30)
    right = struct.pack(">9i", 0, one, 0, -one, 0, 0, 32 * one, 0, 1 << 30)
    at = content.index(plain, content.index(b"tkhd"))
    path.write_bytes(content[:at] + right + content[at + 36 :])
    clip = clip_of(path)
    clip.choose(VideoConfig())
    shown = np.asarray(Image.open(io.BytesIO(clip.frame(0))))
    assert shown.shape[:2] == clip.size == (48, 32)
    assert shown[:20].mean() > 200  # the left is now above
    assert shown[28:].mean() < 40


# ------------------------------------------------------------ as data


OPTIONS = dict(resolution={"fixed": {"size": 8}}, tokens_per_tile=4)


def text_of(sample):
    return "".join(chr(t) if t < 256 else "" if t == IMAGE else "#" for t in sample.tokens)


def record_of(format, folder):
    """The same question about the same clip in each format."""
    if format == "videos":
        (folder / "metadata.csv").write_text("file_name,question,answer\na.mp4,what?,up\n")
        return folder
    if format == "llava":
        turns = [
            {"from": "human", "value": "<video>\nwhat?"},
            {"from": "gpt", "value": "up"},
        ]
        (folder / "t.json").write_text(json.dumps([{"video": "a.mp4", "conversations": turns}]))
        return folder / "t.json"
    parts = [{"type": "video", "video": "a.mp4"}, {"type": "text", "text": "what?"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "up"}]
    (folder / "t.jsonl").write_text(json.dumps({"messages": messages}))
    return folder / "t.jsonl"


@pytest.mark.parametrize("format", ["chat", "llava", "videos"])
def test_a_video_is_its_frames_after_their_times(format, tmp_path):
    write(tmp_path / "a.mp4", range(0, 3000, 250))
    video = {"fps": 1.0, "max_frames": 8}
    talks = VisionChatSource(record_of(format, tmp_path), format=format, video=video, **OPTIONS)
    sample = talks.sample(0)
    assert "<0.0 seconds><1.0 seconds><2.0 seconds>" in text_of(sample)
    assert (sample.tokens == IMAGE).sum() == 3 * 4
    media, good = talks.media(sample)
    assert good
    middles = [float(m["images"][0, :, 4, 4].float().mean()) for m in media]
    assert [round(value / 8) * 8 for value in middles] == [8, 40, 72]
    prompts = Prompts(video=video, **OPTIONS)  # the same question, asked
    (prompt,) = prompts.read(record_of(format, tmp_path), format)
    assert prompt.tokens.tolist() == sample.tokens[: len(prompt.tokens)].tolist()
    assert prompt.answer == "up"
    asked = prompts.media([prompt])["images"]
    assert torch.equal(asked, torch.cat([m["images"] for m in media]))
    plain = VisionChatSource(
        record_of(format, tmp_path), format=format, video={**video, "timestamps": False}, **OPTIONS
    )
    assert "seconds" not in text_of(plain.sample(0))
    assert plain.fingerprint() != talks.fingerprint()


def test_sizes_under_a_budget_are_those_of_frames(tmp_path):
    write(tmp_path / "a.mp4", [0, 500], size=(64, 96))
    budget = {"name": "budget", "budget": {"min_pixels": 1024, "max_pixels": 64 * 96}}
    talks = VisionChatSource(record_of("chat", tmp_path), resolution=budget)
    sample = talks.sample(0)
    assert [(layout.height, layout.width) for layout in sample.layouts] == [(64, 96)] * 2
    media, good = talks.media(sample)
    assert good
    assert media[0]["grids"].tolist() == [[1, 4, 6]]


def test_questions_with_options_are_answered_by_a_letter(tmp_path):
    for name in ("7.mp4", "8.mp4"):
        write(tmp_path / name, [0])
    rows = [
        {"video": 7, "question": "who?", "a0": "a cat", "a1": "a dog", "answer": 1},
        {"video": 8, "question": "where?", "options": ["here", "there"], "answer": "there"},
        {"video": 8, "question": "when?", "options": '["now", "then"]', "answer": "A"},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    talks = VisionChatSource(tmp_path, format="videos", **OPTIONS)
    found = [text_of(talks.sample(i)) for i in range(3)]
    assert "who?\nA. a cat\nB. a dog#\n<|im_start|>assistant\nB#" in found[0]
    assert "where?\nA. here\nB. there#\n<|im_start|>assistant\nB#" in found[1]
    assert "when?\nA. now\nB. then#\n<|im_start|>assistant\nA#" in found[2]


@pytest.mark.parametrize(
    ("row", "key", "value", "code"),
    [
        ({"question": "a?", "options": ["x"], "answer": "y"}, "answer", "y", "unknown"),
        ({"question": "a?", "options": "x", "answer": "x"}, "options", "x", "type"),
        ({"question": "a?"}, "question", ("a?", None), "type"),
    ],
)
def test_wrong_questions_are_rejected(row, key, value, code, tmp_path):
    write(tmp_path / "a.mp4", [0])
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "a.mp4", **row}))
    with rejects(key, value, code, InvalidSample, where="record 0"):
        VisionChatSource(tmp_path, format="videos", **OPTIONS)


@pytest.mark.parametrize("damage", ["bytes", "truncated", "sound", "missing"])
def test_F76_damaged_videos(damage, tmp_path, capfd):
    for name in ("good", "bad"):
        write(tmp_path / f"{name}.mp4", range(0, 3000, 250))
    bad = tmp_path / "bad.mp4"
    if damage == "missing":
        bad.unlink()
    elif damage == "sound":
        with av.open(str(bad), "w") as container:
            stream = container.add_stream("aac", rate=8000)
            stream.layout = "mono"
            sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            sound.rate = 8000
            container.mux(stream.encode(sound))
            container.mux(stream.encode())
    else:
        bad.write_bytes(b"no video" if damage == "bytes" else bad.read_bytes()[:-400])
    (tmp_path / "metadata.csv").write_text(
        "file_name,question,answer\ngood.mp4,what?,up\nbad.mp4,what?,down\n"
    )

    def read():
        VisionChatSource(tmp_path, format="videos", **OPTIONS).stream(200).arrays(np.arange(2))

    code = "unreadable" if damage == "missing" else "damaged"
    with rejects("", ..., code, InvalidSample, where="bad.mp4"):
        read()
    talks = VisionChatSource(tmp_path, format="videos", corrupt="mask", pack=False, **OPTIONS)
    arrays = talks.stream(200).arrays(np.arange(2))
    assert (arrays["labels"] != -100).any(1).sum() == 1
    assert talks.masked == 1
    assert "bad.mp4" in capfd.readouterr().err
    kept = VisionChatSource(tmp_path, format="videos", corrupt="skip", **OPTIONS)
    assert len(kept.lengths) == 1
    (warning,) = kept.counted.warnings()
    assert re.findall("[0-9]+", warning) == ["1", "2"]

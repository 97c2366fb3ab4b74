"""forge-train report: the page holds the rows, shows what a run directory says as text, and fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from forge_lab.cli import report
from forge_lab.report import curves
from forge_lab.report.curves import Curves, thin
from forge_lab.report.goodput import strip
from forge_lab.report.page import write_page
from forge_resilience.goodput import read_goodput_table
from forge_testing.problems import rejects
from forge_testing.runs import fit_alone, make_job
from forge_train import ConfigError, Run, column_of, read_run

pytestmark = pytest.mark.lane("test")

pytest.importorskip("plotly")

HOSTILE = "</script><script>alert('x')</script><img src=http://evil.test/x.png onerror=alert(1)>"
MIXTURE = """
[model.moe]
num_experts = 4
"""


class Page(HTMLParser):
    """Elements, attributes, and texts of scripts and cells."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.rows: list[list[str]] = []
        self.text, self.in_script, self.in_cell = "", False, False
        self.feed(path.read_text(encoding="utf-8"))
        self.data = json.loads(self.scripts[0])
        self.pictures = {picture["id"]: picture for picture in self.data["pictures"]}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.in_script = tag == "script"
        if tag == "script":
            self.scripts.append("")
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.in_script:
            self.scripts[-1] += data
        else:
            self.text += data
            if self.in_cell:
                self.rows[-1][-1] += data

    def curve(self, picture: str, name: str) -> tuple[dict[str, list], list]:
        """x values by axis, and y of a trace."""
        (trace,) = (t for t in self.pictures[picture]["traces"] if t["name"] == name)
        return self.data["axes"][trace["axis"]], trace["y"]

    def cells(self, key: str) -> list[str]:
        found = ([cell.strip() for cell in row] for row in self.rows)
        return next((row[1:] for row in found if row and row[0] == key), [])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = make_job(tmp_path_factory.mktemp("reported"), MIXTURE)
    fit_alone(job, **{"metrics.expert_loads": True, "metrics.console": "off"})
    (job.parent / "run/sample.txt").write_text("The end.\n")
    return job.parent / "run"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """The run without checkpoints, to be changed."""
    return Path(shutil.copytree(run, tmp_path / "other", ignore=lambda *_: {"checkpoints"}))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write_rows(folder: Path, rows: list[dict[str, Any]], end: str = "") -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + end)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_page_has_the_rows_and_no_other_file_changes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    assert report([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    page = Page(run / "report.html")
    metrics = read_run(run).metrics
    for picture, name in (("loss", "loss"), ("learning-rate", "lr"), ("gradient-norm", "grad_norm"),
                          ("throughput", "tokens_per_second"), ("memory", "memory_bytes")):  # fmt: skip
        x, y = page.curve(picture, name)
        assert y == metrics[name], name
        assert [x[k] for k in ("step", "tokens", "flops")] == [
            metrics[k] for k in ("step", "tokens", "flops")
        ]
        assert x["hours"] == [round(seconds / 3600, 7) for seconds in metrics["seconds"]]
    x, y = page.curve("loss", "val_loss")
    assert (x["step"], y) == ([6, 12], [metrics["val_loss"][5], metrics["val_loss"][11]])
    (heat,) = page.pictures["experts-0"]["traces"]
    assert heat["x"] == metrics["step"]
    assert [list(row) for row in zip(*heat["z"])] == metrics["moe.0.load"]
    assert page.cells("val_loss")[:2] == [f"{metrics['val_loss'][-1]:.6g}", "12"]
    assert page.cells("model.moe.num_experts")[0].split()[0] == "4"
    assert page.cells("model.moe.top_k") == []  # a default
    assert page.cells("versions.torch") == [read_run(run).environment["versions"]["torch"]]
    assert "The end." in page.text
    ledger = read_goodput_table(read_run(run).events)
    lives = page.pictures["lives"]
    unit = lives["unit"].split()[0]  # of a long run, or of this one on a slow machine, not seconds
    length = ledger.wall_ms / {"seconds": 1_000, "minutes": 60_000, "hours": 3_600_000}[unit]
    bars = [t for t in lives["traces"] if t["type"] == "bar"]
    assert sum(sum(bar["x"]) for bar in bars) == pytest.approx(length, rel=0.2)
    assert report([str(run)]) == 0  # again
    after = contents(run)
    assert after.pop(run / "report.html")
    assert after == before


@pytest.mark.parametrize("verb", ["report", "goodput"])
def test_a_report_imports_no_torch(copy: Path, verb: str) -> None:
    code = "import sys; from forge_train.cli import run_verb; run_verb(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, verb, str(copy)], capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.lane("quick")
def test_runs_next_to_each_other_show_the_keys_that_differ(
    run: Path, copy: Path, tmp_path: Path
) -> None:
    text = (copy / "config.toml").read_text()
    assert "lr = 0.01 #" in text
    (copy / "config.toml").write_text(re.sub("lr = 0.01 # .*", "lr = 0.5 # flag", text))
    write_rows(copy, [row | {"mine": 2.0} for row in rows_of(copy)[:4]])
    assert report([str(run), str(copy), "--output", str(tmp_path / "both.html")]) == 0
    page = Page(tmp_path / "both.html")
    for name, folder in (("run", run), ("other", copy)):
        x, y = page.curve("loss", f"{name}: loss")
        assert (x["step"], y) == (
            read_run(folder).metrics["step"],
            read_run(folder).metrics["loss"],
        )
    mine = next(p["id"] for p in page.pictures.values() if p["title"] == "mine")
    assert page.curve(mine, "other")[1] == [2.0] * 4
    assert [cell.split()[0] for cell in page.cells("optimizer.lr")] == ["0.01", "0.5"]
    assert "flag" in page.cells("optimizer.lr")[1]
    assert page.cells("train.steps") == []  # the same


def test_a_profile_is_shown_as_its_tables(copy: Path) -> None:
    span = {"count": 4, "host_seconds": 0.08, "device_seconds": 0.06, "idle_seconds": 0.02}
    found: dict[str, Any] = {"step": 10, "rank": 1, "device": "cpu", "steps": 2, "seconds": 0.1}
    found |= {"kinds": {"gemm": 0.07, "idle": 0.03}, "communication_hidden": 0.0}
    found |= {"spans": {"forward": span}, "memory": {"step_peak": 3 * 2**20}}
    for step, table in ((2, found), (10, found), (7, {**found, "kinds": {"of later": 1.0}})):
        folder = copy / f"profile/step-{step}"
        folder.mkdir(parents=True)
        (folder / "rank-1.json").write_text(json.dumps({**table, "step": step}))
    page = Page(write_page([copy]))
    assert page.cells("matrix products") == ["35.000", "70.0%"]
    assert page.cells("idle") == ["15.000", "30.0%"]
    assert page.cells("forward") == ["2", "40.000", "30.000", "10.000"]
    assert page.cells("step's peak, these two") == ["3.00"]
    assert page.cells("of later") == ["1"]  # of another version: as it is
    places = [page.text.index(f"profile/step-{step}/") for step in (2, 7, 10)]
    assert places == sorted(places)
    assert "steps 10 to 11, rank 1" in page.text


def test_other_columns_have_their_units_and_meanings(copy: Path) -> None:
    more = {f"gradient.{part}.{m}": 1.0 for part in ("0", "1", "rest") for m in ("norm", "snr")}
    more |= {"schema": 1, "val_bits_per_byte": 2.0, "mine.1.x": 3.0, "mine.2.x": 4.0}
    rows = rows_of(copy)
    write_rows(copy, [row | more if row["step"] % 5 else row for row in rows])
    page = Page(write_page([copy]))
    found = {p["title"]: [t.get("name") for t in p["traces"]] for p in page.pictures.values()}
    parts = [f"gradient.{part}.norm" for part in ("0", "1", "rest")]
    assert found["gradient.<part>.norm"] == parts
    assert found["mine.*.x"] == ["mine.1.x", "mine.2.x"]
    (curve,) = page.pictures["bits-per-byte"]["traces"]
    assert curve["name"] == "val_bits_per_byte"
    assert "schema" not in found
    noise = next(p for p in page.pictures.values() if p["title"] == "gradient.<part>.snr")
    assert noise["unit"] == "ratio"
    listed = column_of("gradient.0.snr")
    assert listed is not None
    assert noise["note"].lower() == f"{listed.meaning}.".lower()
    assert None not in page.curve(noise["id"], "gradient.0.snr")[1]  # not each row has one
    assert page.cells("val_bits_per_byte")[0] == "2"


def hostile(folder: Path) -> Path:
    """A run whose every text wants to be markup; its own folder, too."""
    config = (folder / "config.toml").read_text()
    config = re.sub(r"prompt = .*", f"prompt = {json.dumps(HOSTILE)} # flag", config)
    (folder / "config.toml").write_text(config)
    environment = json.loads((folder / "environment.json").read_text())
    environment |= {"hosts": [HOSTILE], "command": [HOSTILE]}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "sample.txt").write_text(HOSTILE)
    (folder / "parent.json").write_text(json.dumps({"run_dir": HOSTILE, HOSTILE: [{HOSTILE: 1}]}))
    write_rows(
        folder, [row | {HOSTILE: 1.0, f"eval/{HOSTILE}/loss": 2.0} for row in rows_of(folder)]
    )
    with (folder / "events.jsonl").open("a") as file:
        event = {"event": "rollback", "time": "2026-01-01T00:00:00+00:00", "step": HOSTILE}
        file.write(json.dumps(event | {"cause": HOSTILE, HOSTILE: "\ud800"}) + "\n")
    profile = folder / "profile/step-3"
    profile.mkdir(parents=True)
    rows = {"kernels": [{"name": HOSTILE, "seconds": 1.5}, {"name": "gemm", "seconds": 2.25}]}
    (profile / "rank-0.json").write_text(json.dumps(rows))
    (folder / "profile/rank-0.json").write_text("{torn")
    named = folder.with_name("<script>alert(1)<&script>")
    return Path(shutil.move(folder, named))


def test_output_of_a_run_is_escaped_text_and_nothing_is_fetched(copy: Path) -> None:
    folder = hostile(copy)
    page = Page(write_page([folder]))
    scripts = [attrs for tag, attrs in page.elements if tag == "script"]
    assert [attrs.get("type") for attrs in scripts] == ["application/json", None, None]
    assert not [tag for tag, _ in page.elements if tag in ("img", "link", "iframe", "object")]
    for tag, attrs in page.elements:
        assert not [name for name in attrs if name.startswith("on")], tag
        assert not {"src", "data", "action"} & set(attrs), tag
        assert (attrs.get("href") or "#").startswith("#"), tag
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    for script in page.scripts[1:]:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    # shown as it is, once each at least: title, configuration, environment, sample, parent, event, profile
    assert page.text.count(HOSTILE) >= 8
    assert "<script>alert(1)<&script>" in page.text
    assert page.cells("gemm") == ["2.25"]
    assert "profile/rank-0.json" in page.text
    assert "Expecting property name" in page.text  # json of the torn one
    # plotly.js takes some markup in its texts: none is left
    shown = [t for p in page.pictures.values() for t in [*(p.get("labels") or ()), *_names(p)]]
    assert any("alert" in text for text in shown)
    assert not [text for text in shown if "<" in text]


def _names(picture: dict[str, Any]) -> list[str]:
    marks = [text for t in picture["traces"] for text in t.get("text", ())]
    return [t["name"] for t in picture["traces"] if "name" in t] + marks


@pytest.mark.lane("quick")
@pytest.mark.parametrize("case", ["running", "one row", "no row", "no validation", "no events", "not finite", "not our types"])  # fmt: skip
def test_runs_of_all_kinds_have_a_page(copy: Path, case: str) -> None:
    rows, torn = rows_of(copy), '{"step": 13, "lo'
    events = (copy / "events.jsonl").read_text().splitlines()
    if case == "running":
        (copy / "events.jsonl").write_text("\n".join(events[:3]) + '\n{"event": "sa')
        write_rows(copy, rows[:5], torn)
    elif case == "one row":
        write_rows(copy, rows[:1])
    elif case == "no row":
        (copy / "metrics.jsonl").unlink()
        (copy / "sample.txt").unlink()
    elif case == "no validation":
        write_rows(copy, [{k: v for k, v in row.items() if k != "val_loss"} for row in rows])
    elif case == "no events":
        (copy / "events.jsonl").unlink()
    elif case == "not finite":
        write_rows(
            copy, [row | ({"loss": float("nan")} if row["step"] == 3 else {}) for row in rows]
        )
    else:
        strange = {
            "loss": "x",
            "lr": [1],
            "tokens": {},
            "moe.0.load": 3,
            "grad_norm": 10**400,
            "flops": True,
        }
        write_rows(copy, [rows[0] | strange, *rows[1:]])
        (copy / "events.jsonl").write_text(
            "\n".join([*events, '{"event": [1], "time": {}}', '{"event": "save"}'])
        )
    page = Page(write_page([copy]))
    assert ("staterunning" in page.text) == (case == "running")  # a term and its value
    assert ("loss" in page.pictures) == (case != "no row")
    assert ("lives" in page.pictures) == (case != "no events")
    if case == "running":
        assert page.curve("loss", "loss")[1] == [row["loss"] for row in rows[:5]]
    elif case == "one row":
        assert page.pictures["loss"]["traces"][0]["mode"] == "lines+markers"
    elif case == "not finite":
        assert page.curve("loss", "loss")[1] == [
            None if r["step"] == 3 else r["loss"] for r in rows
        ]
    elif case == "not our types":
        assert page.curve("loss", "loss")[1] == [row["loss"] for row in rows[1:]]


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_long_run_is_thinned_to_extremes_and_gaps(copy: Path) -> None:
    values: list[float | None] = [float(i * 7919 % 1009) for i in range(50_000)]
    values[31_234], values[777], values[40_000] = 1e6, -1e6, None
    kept = thin(values, range(len(values)), 2000)
    assert 1000 < len(kept) <= 2000
    assert kept == sorted(set(kept))
    assert {31_234, 777, 40_000} <= set(kept)
    assert thin(values, range(3), 2000) == [0, 1, 2]
    row = rows_of(copy)[0]
    write_rows(copy, [row | {"step": i + 1, "loss": v} for i, v in enumerate(values[:20_000])])
    page = Page(write_page([copy]))
    x, y = page.curve("loss", "loss")
    assert len(y) <= 2000
    assert all(values[step - 1] == value for step, value in zip(x["step"], y))
    assert min(y) == -1e6
    assert "are thinned" in page.text
    assert len(page.scripts[0]) < 3e6


@pytest.mark.parametrize("steps", [range(1, 13, 2), range(2, 13, 2), (2, 4, 6, 8, 10, 11, 12)])
@pytest.mark.parametrize("column", ["val_loss", "eval/held_out/loss"])
def test_F180_points_of_evaluations_are_connected_however_many_rows_have_one(
    column: str, steps: Sequence[int]
) -> None:
    rows = range(1, 13)
    losses = [None if step == 7 else 1.0 / step for step in rows]
    values = [2.0 / step if step in steps else None for step in rows]
    run = Run({}, {}, {"step": list(rows), "loss": losses, column: values}, [])
    drawn = Curves({"a": run})
    traces = {trace["name"]: trace for trace in drawn.learning[0]["traces"]}
    assert traces[column]["y"] == [2.0 / step for step in steps], "without gaps"
    assert drawn.axes[traces[column]["axis"]]["step"] == [*steps]
    assert traces["loss"]["y"] == losses


def test_F195_only_curves_that_a_plot_shows_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """3,000 columns of one picture: the first 40 are thinned, and the list of columns is compiled once."""
    steps = list(range(1, 31))
    metrics = {"step": steps, **{f"mine.{n}": [float(n)] * 30 for n in range(3000)}}
    thinned, compiled = [], []
    monkeypatch.setattr(curves, "thin", lambda v, rows, _: thinned.append(1) or [*rows])
    monkeypatch.setattr(re, "escape", lambda text: compiled.append(1) or text)
    (picture,) = Curves({"a": Run({}, {}, metrics, [])}).others
    assert _names(picture) == [f"mine.{n}" for n in range(40)]
    assert "40 of 3000" in picture["note"]
    assert len(thinned) == 40
    assert len(compiled) <= 100  # twice for each column of docs/metrics.md


def test_F195_a_page_follows_no_link_out_of_the_run(copy: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"password": "hunter2"}')
    (copy / "sample.txt").unlink()
    (copy / "sample.txt").symlink_to(secret)
    (copy / "profile").mkdir(exist_ok=True)
    (copy / "profile/step-1.json").symlink_to(secret)
    text = write_page([copy]).read_text()
    assert "hunter2" not in text
    assert text.count("out of the run") == 2  # prose: a mark of the page
    (copy / "sample.txt").unlink()
    (copy / "real.txt").write_text("The real end.")
    (copy / "sample.txt").symlink_to("real.txt")
    assert "The real end." in write_page([copy]).read_text()


def test_a_strip_of_very_many_spans_is_divided_into_cells() -> None:
    at = 1_700_000_000.0
    events: list[dict[str, Any]] = [{"event": "start", "time": at, "step": 0, "began": at - 5}]
    events += [
        {"event": "evaluation", "time": at + 10 * i, "step": i, "seconds": 2.0 if i < 1500 else 9.0}
        for i in range(1, 3000)
    ]
    ledger = read_goodput_table(events)
    assert len(ledger.spans) > 5000
    picture = strip({"a": (ledger, events)})
    assert picture is not None
    bars = {t["name"]: t for t in picture["traces"] if t["type"] == "bar"}
    lengths = [length for bar in bars.values() for length in bar["x"]]
    assert len(lengths) <= 1002
    assert sum(lengths) * 3600 == pytest.approx(ledger.wall_ms / 1000, rel=2e-3)
    half = pytest.approx(15_000 / 3600, abs=0.02)  # from there on it evaluates most of the time
    assert (
        bars["evaluate"]["base"][-1] == half == bars["steps"]["base"][-1] + bars["steps"]["x"][-1]
    )


@pytest.mark.parametrize(("seconds", "divisor"), [(100, 1), (600, 60), (4 * 3600, 3600)])
def test_F197_marks_of_the_timeline_are_in_the_unit_of_its_bars(seconds: int, divisor: int) -> None:
    at = 1_700_000_000.0
    events: list[dict[str, Any]] = [
        {"event": "start", "time": at, "step": 0, "began": at},
        {"event": "save", "time": at + seconds / 4, "step": 1, "seconds": 1.0},
        {"event": "done", "time": at + seconds, "step": 2},
    ]
    as_text = [{**e, "time": datetime.fromtimestamp(e["time"], UTC).isoformat()} for e in events]
    drawn = strip({"a": (read_goodput_table(events), as_text)})
    assert drawn is not None
    marks = {t["name"]: t["x"] for t in drawn["traces"] if t["type"] == "scatter"}
    bars = [t for t in drawn["traces"] if t["type"] == "bar"]
    assert marks["save"] == [pytest.approx(seconds / 4 / divisor)]
    assert marks["done"] == [pytest.approx(seconds / divisor)]
    ends = [begin + x for bar in bars for begin, x in zip(bar["base"], bar["x"])]
    assert max(ends) == marks["done"][0]


@pytest.mark.lane("quick")
def test_invalid_arguments_are_rejected(
    run: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value, code, args in (
        ("run", str(tmp_path), "not_found", [tmp_path]),
        ("RUNS", [], None, []),
        ("--output", ..., "missing", [run, copy]),
        ("run", str(run), "duplicate", [run, run, "--output", tmp_path / "x.html"]),
        (
            "--output",
            str(tmp_path / "none/x.html"),
            "write",
            [run, "--output", tmp_path / "none/x.html"],
        ),
    ):
        with rejects(key, value, code, ConfigError):
            report([str(arg) for arg in args])
    (copy / "environment.json").write_text("{torn")
    with rejects("run", str(copy), "damaged", ConfigError):
        report([str(copy)])
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with rejects("report", ..., "requires", ConfigError, where="plotly"):
        report([str(run)])
    assert not list(tmp_path.glob("*.html"))


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)  # fmt: skip
#: Turns the controls, and leaves what is drawn in the document.
PROBE = """<script>
const told = {};
const loss = document.getElementById("loss");
const turn = (name, set) => { set(controls.elements[name]); controls.dispatchEvent(new Event("input")); };
turn("x", (e) => { e.value = "tokens"; });
told.tokens = loss.data[0].x;
turn("logy", (e) => { e.checked = true; });
told.axis = loss.layout.yaxis.type;
turn("smooth", (e) => { e.value = "0.5"; });
told.smooth = loss.data[0].y.slice(0, 3);
document.getElementById("others").open = true;
setTimeout(() => {
  told.drawn = document.querySelectorAll(".js-plotly-plot .main-svg").length > 0;
  told.others = document.querySelectorAll("#others .js-plotly-plot").length;
  const buttons = Array.from(document.querySelectorAll(".modebar-btn"), (b) => b.dataset.title || "");
  told.share = buttons.filter((title) => /share|cloud/i.test(title)).length;
  const out = document.createElement("pre");
  out.id = "told";
  out.textContent = JSON.stringify(told);
  document.body.append(out);
}, 300);
</script></body>"""


def browse(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The document after its scripts ran, and what the browser complained about."""
    flags = (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={profile}", "--virtual-time-budget=10000", "--enable-logging=stderr"),
        *("--v=0", "--window-size=1280,2000", "--dump-dom"),
    )
    assert CHROMIUM is not None
    url = page.resolve().as_uri()
    done = subprocess.run([CHROMIUM, *flags, url], capture_output=True, text=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium")
def test_a_browser_draws_all_plots_without_an_error(copy: Path, tmp_path: Path) -> None:
    folder = hostile(copy)
    path = write_page([folder])
    page, metrics = Page(path), read_run(folder).metrics
    document, complaints = browse(path, tmp_path / "profile")
    assert complaints == []
    hidden = [name for name in page.pictures if name.startswith("other-")]
    assert f'data-drawn="{len(page.pictures) - len(hidden)}"' in document
    probed = path.with_name("probed.html")
    text = re.sub(r"<meta http-equiv[^>]*>", "", path.read_text(encoding="utf-8"))
    probed.write_text(text.replace("</body>", PROBE), encoding="utf-8")
    document, complaints = browse(probed, tmp_path / "profile")
    assert complaints == []
    found = re.search(r'<pre id="told">(.*?)</pre>', document)
    assert found is not None
    told = json.loads(found[1])
    first = metrics["loss"][:3]
    ema = [
        first[0],
        (first[0] / 2 + first[1]) / 1.5,
        (first[0] / 4 + first[1] / 2 + first[2]) / 1.75,
    ]
    assert told["tokens"] == metrics["tokens"]
    assert told["axis"] == "log"
    assert told["smooth"] == pytest.approx(ema)
    assert (told["drawn"], told["others"], told["share"]) == (True, len(hidden), 0)

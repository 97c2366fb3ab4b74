"""`forge-train report`: runs as one HTML page that needs no network; only the page is written."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import tomlkit
from tomlkit.container import Container
from tomlkit.items import InlineTable, Table

from forge_lab._shared.atomic import write_file
from forge_lab._shared.problems import invalid
from forge_lab._shared.toml_files import flatten, read_text
from forge_lab.report.curves import Curves, expert_plot, floats, number
from forge_lab.report.goodput import read_run_ledger, shares, strip
from forge_resilience.goodput import CAUSES, Goodput, GoodputTable, goodput
from forge_train import Run, RunDirectory, read_run
from forge_train.errors import ConfigError, write_errors

_MOST_EVENTS = 200
_MOST_ELEMENTS = 20  # of a list in a table
_MOST_SAMPLE = 20_000  # characters
_MOST_PROFILE = 4 * 2**20  # bytes
_QUIET = ("save_staged", "save_written", "save", "pause", "evaluation")  # left out of the table
_HIGHER = ("accuracy", "exact_match")  # ends of measures where higher is better


@dataclass(frozen=True)
class PageRun:
    """A run of the page, and its ledger of seconds."""

    paths: RunDirectory
    text: str  # of config.toml
    run: Run
    ledger: GoodputTable
    goodput: Goodput


def write_page(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page of one run, or of several side by side; return its path.

        write_page([Path("runs/a")])                                   # runs/a/report.html
        write_page([Path("runs/a"), Path("runs/b")], Path("ab.html"))

    The page is replaced atomically. Raises ConfigError for a folder that is not a run, and where the page cannot be
    written. Needs the extra `forge-lab[report]`.
    """
    if output is None and len(folders) != 1:
        rule, fix = f"must name the page of {len(folders)} runs", "give --output FILE.html"
        raise invalid("--output", "missing", ..., rule, fix, kind=ConfigError)

    render = _renderer()
    names = _names(folders)
    text = render({name: _read(folder) for name, folder in zip(names, folders)})
    path = RunDirectory(folders[0]).page if output is None else output
    with write_errors("--output", path, "name a FILE.html in a folder of yours"):
        write_file(path, text.encode(errors="replace").decode())  # lone surrogates of JSON
    return path


def _names(folders: Sequence[Path]) -> list[str]:
    """Last parts of the paths where they differ, else the paths."""
    short = [folder.resolve().name or str(folder) for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        twice, fix = max(names, key=names.count), "name each run once"
        raise invalid("run", "duplicate", twice, "is given twice", fix, kind=ConfigError)
    return names


def _read(folder: Path) -> PageRun:
    paths = RunDirectory(folder)
    try:
        run, text = read_run(folder, floats), read_text(paths.config)
    except FileNotFoundError as error:
        rule, fix = f"must be the folder of a run ({error.filename or error})", "name another one"
        raise invalid("run", "not_found", str(folder), rule, fix, kind=ConfigError) from error
    except (OSError, ValueError) as error:
        rule, fix = f"cannot be read ({error})", "restore config.toml and environment.json"
        raise invalid("run", "damaged", str(folder), rule, fix, kind=ConfigError) from error
    ledger = read_run_ledger(paths, run.events)
    return PageRun(paths, text, run, ledger, goodput(ledger))


def _renderer() -> Callable[[Mapping[str, PageRun]], str]:
    """Load the template and its scripts. ConfigError for a missing package, before anything is read."""
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        rule = f"needs {error.name}, which is not installed"
        fix = "pip install 'forge-lab[report]', or print a table by forge-train goodput"
        raise invalid("report", "requires", ..., rule, fix, kind=ConfigError) from error

    here = Path(__file__).parent / "template"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"figure": figure, "span": seconds_text, "json_text": _json_text}
    scripts = [get_plotlyjs(), (here / "page.js").read_text(encoding="utf-8")]
    # only these two scripts run, and nothing is fetched, whatever a run directory contains
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    sources = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    template = environment.get_template("page.html.jinja")
    return lambda parts: template.render(scripts=scripts, sources=sources, **_content(parts))


def _content(parts: Mapping[str, PageRun]) -> dict[str, Any]:
    """Variables of the template."""
    runs = {name: part.run for name, part in parts.items()}
    curves = Curves(runs)
    experts: list[dict[str, Any]] = []
    for name, run in runs.items():
        if (plot := expert_plot(run)) is not None:
            plot |= {"id": f"experts-{len(experts)}", "title": f"Load of experts, {name}"}
            experts.append(plot)
    for count, plot in enumerate(curves.others):
        plot["id"] = f"other-{count}"

    with_events = {name: part for name, part in parts.items() if part.run.events}
    found = {name: part.goodput for name, part in with_events.items()}
    over_time = strip({name: (part.ledger, part.run.events) for name, part in with_events.items()})
    time = [plot for plot in (over_time, shares(found) if over_time else None) if plot]

    return {
        "names": list(parts),
        "summary": {name: _summary(part) for name, part in parts.items()},
        "curves": curves,
        "experts": experts,
        "time": time,
        "goodput": found if over_time else {},
        "causes": CAUSES,
        "evaluations": {name: _evaluations(run) for name, run in runs.items()},
        "config": _config(parts),
        "texts": {name: part.text for name, part in parts.items()},
        "environment": _compared({n: _environment(run.environment) for n, run in runs.items()}),
        "samples": {name: _sample(part.paths) for name, part in parts.items()},
        "parents": {name: run.parent for name, run in runs.items() if run.parent is not None},
        "events": {name: _events(run) for name, run in runs.items()},
        "profiles": {name: pages for name, part in parts.items() if (pages := _profiles(part))},
        "data": {
            "axes": curves.axes,
            "pictures": [*curves.learning, *curves.speed, *time, *experts, *curves.others],
        },
    }


def _summary(part: PageRun) -> dict[str, str]:
    """Rows of the first table: title -> text, "" where a run has no value."""
    metrics, total = part.run.metrics, _last_of_events(part.run, "total_steps")
    last = {name: _numbers(metrics, name)[-1:] for name in ("step", "loss", "val_loss", "tokens")}
    step = "".join(figure(value) for value in last["step"])
    rows = {
        "state": _state(part.run),
        "step": f"{step or 'none yet'} of {figure(total)}" if total else step,
        "tokens": "".join(figure(value) for value in last["tokens"]),
        "last loss": "".join(figure(value) for value in last["loss"]),
        "last validation loss": "".join(figure(value) for value in last["val_loss"]),
    }

    for title, column in (("tokens per second", "tokens_per_second"), ("MFU", "mfu")):
        values = _numbers(metrics, column)
        rows[f"{title} (median)"] = figure(statistics.median(values)) if values else ""
    rows["skipped steps"] = figure(sum(_numbers(metrics, "skipped_steps")))
    memory = max(_numbers(metrics, "memory_bytes"), default=None)
    rows["peak memory"] = "" if memory is None else f"{memory / 2**30:.3g} GiB"

    if part.ledger.spans:
        found = part.goodput
        rows["wall clock"] = seconds_text(found.wall_seconds)
        rows["device hours"] = figure(sum(found.gpu_hours.values()))
        rows["kept steps / wall clock"] = f"{found.ettr:.1%}"
        ends = f"crashed {found.losses}, stopped on request {found.stops}"
        rows["attempts"] = f"{found.lives}, {ends}"
    return rows


def _state(run: Run) -> str:
    """The state of the run, by its newest event about an attempt."""
    kinds = ("start", "resume", "stop", "done", "hang")
    last = next((e for e in reversed(run.events) if e.get("event") in kinds), None)
    if last is None:
        return "not started"
    if last["event"] == "done":
        return "done"
    if last["event"] == "stop":
        return f"stopped on request ({last.get('signal')}), to go on"
    if last["event"] == "hang":
        return "hung"
    return "running, or ended without an event"


def _last_of_events(run: Run, name: str) -> Any:
    return next((value for e in reversed(run.events) if (value := number(e.get(name)))), None)


def _numbers(metrics: Mapping[str, list[Any]], name: str) -> list[float]:
    values = floats(metrics.get(name, ()))
    found: list[float] = values[~numpy.isnan(values)].tolist()
    return found


def _evaluations(run: Run) -> list[tuple[str, float, Any, float, Any]]:
    """(measure, last value, its step, best value, its step) of each column of an evaluation."""
    found = []
    for name, values in run.metrics.items():
        if not name.startswith(("val_", "eval/")):
            continue
        numbers = floats(values)
        there = [(float(numbers[i]), run.metrics["step"][i]) for i in numpy.flatnonzero(~numpy.isnan(numbers))]  # fmt: skip
        if there:
            choose = max if name.endswith(_HIGHER) or "accuracy" in name else min
            best = choose(there, key=lambda pair: pair[0])
            found.append((name, *there[-1], *best))
    return found


def _config(parts: Mapping[str, PageRun]) -> list[tuple[str, list[tuple[str, str]], bool]]:
    """(key, (value, origin) of each run, whether they differ): the keys that differ, of one run those that were set.

    The origins are the comments that the run wrote after its values.
    """
    tables = {name: dict(flatten(part.run.config)) for name, part in parts.items()}
    origins = {name: _origins(part.text) for name, part in parts.items()}
    found = []
    for key in dict.fromkeys(key for table in tables.values() for key in table):
        cells = [
            (_json_text(table[key]), origins[name].get(key, "")) if key in table else ("", "")
            for name, table in tables.items()
        ]
        first, *others = (table.get(key) for table in tables.values())
        differ = any(other != first for other in others)
        own = len(parts) == 1 and cells[0][1].partition(" ")[0] not in ("", "default", "derived")
        if differ or own:
            found.append((key, cells, differ))
    return found


def _origins(text: str) -> dict[str, str]:
    """The comment after each value of a TOML file, by dotted key."""

    def walk(table: Container, prefix: str) -> Iterator[tuple[str, str]]:
        for key, item in table.body:
            if key is not None and isinstance(item, Table | InlineTable):
                yield from walk(item.value, f"{prefix}{key.key}.")
            elif key is not None:
                yield f"{prefix}{key.key}", item.trivia.comment.lstrip("# ")

    return dict(walk(tomlkit.parse(text), ""))


def _environment(environment: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> text."""
    found = {}
    for key, value in flatten(environment):
        if key == "command" and isinstance(value, list):
            value = shlex.join(str(word) for word in value)
        elif key == "hosts" and isinstance(value, list):
            named = list(dict.fromkeys(str(host) for host in value))
            value = f"{_count(value, 'rank')} on {_count(named, 'host')}: {', '.join(named[:20])}"
        elif value == {}:
            value = "none"
        found[key] = value if isinstance(value, str) else _json_text(value)
    return found


def _count(values: Sequence[Any], name: str) -> str:
    return f"{len(values)} {name}" + "s" * (len(values) != 1)


def _compared(tables: Mapping[str, Mapping[str, str]]) -> list[tuple[str, list[str], bool]]:
    """(key, value of each run, whether they differ)."""
    keys = dict.fromkeys(key for table in tables.values() for key in table)
    rows = [(key, [table.get(key, "") for table in tables.values()]) for key in keys]
    return [(key, values, len(set(values)) > 1) for key, values in rows]


def _sample(paths: RunDirectory) -> str:
    """The text that the run generated at its end; "" without one."""
    if not paths.sample.is_file():
        return ""
    if _leads_out(paths.sample, paths.path):
        return f"{paths.sample.name} is a link out of the run, which is not followed"
    with paths.sample.open(encoding="utf-8", errors="replace") as file:
        return file.read(_MOST_SAMPLE)


def _leads_out(path: Path, folder: Path) -> bool:
    """Whether a path of a run is a link to a file elsewhere, which a page that is sent to others must not contain."""
    return not path.resolve().is_relative_to(folder.resolve())


def _events(run: Run) -> list[tuple[str, ...]]:
    """(time, event, step, the rest as JSON) of the last events, without the frequent ones."""
    shown = [event for event in run.events if event.get("event") not in _QUIET]
    head = ("time", "event", "step", "pid", "host")
    return [
        (
            *(str(event.get(key, "")) for key in head[:3]),
            _json_text({k: v for k, v in event.items() if k not in head})[:2000],
        )
        for event in shown[-_MOST_EVENTS:]
    ]


def _profiles(part: PageRun) -> list[tuple[str, list[Any], Any]]:
    """(title, tables, content) of each profile.

    A profile of another form than ours has no tables; one that cannot be read has the reason as its content.
    """
    root, found = part.paths.path, list[tuple[str, list[Any], Any]]()
    paths = sorted(root.glob("profile/**/*.json"), key=_by_numbers)
    if paths:  # imports torch, which a page without a profile does not need
        from forge_parallel.profile import tables

    for path in paths:
        content: Any
        own = list[Any]()
        title = str(path.relative_to(root))
        try:
            if _leads_out(path, root):
                raise OSError("a link out of the run")
            content = json.loads(read_text(path, _MOST_PROFILE))
            own = tables(content)
            last = content["step"] + content["steps"] - 1
            title = f"steps {content['step']} to {last}, rank {content['rank']} ({title})"

        except (OSError, ValueError, RecursionError) as error:
            content = f"cannot be read: {error}"
        except (ArithmeticError, AttributeError, LookupError, TypeError):
            pass
        found.append((title, own, content))
    return found


def _by_numbers(path: Path) -> list[Any]:
    """A key that sorts step-2 before step-10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def figure(value: Any) -> str:
    """A number for a person: six digits, thousands apart."""
    found = number(value)
    if found is None:
        return "" if value is None else str(value)
    if isinstance(found, int) or (found == int(found) and abs(found) < 1e15):
        return f"{int(found):,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return f"{found:.6g}"


def seconds_text(seconds: float) -> str:
    """A time for a person: 0.43 s, 12 min 5 s, 3 h 4 min, 2 d 5 h."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    for unit, size, smaller, part in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):  # fmt: skip
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // part)} {smaller}"
    raise AssertionError


def _json_text(value: Any) -> str:
    if isinstance(value, list) and len(value) > _MOST_ELEMENTS:
        first = json.dumps(value[:_MOST_ELEMENTS], ensure_ascii=False, default=str)
        return f"{first} and {len(value) - _MOST_ELEMENTS} more"
    return json.dumps(value, ensure_ascii=False, default=str)

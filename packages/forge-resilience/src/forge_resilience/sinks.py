"""Sinks of a run's rows of metrics: a file of JSON lines, TensorBoard, Weights & Biases, MLflow.

    sink = BackgroundSink(lambda: JsonlSink("runs/a/metrics.jsonl", resume_step=100), "metrics")

A row is a mapping of names to values; its `step` is a number. One run directory is one run of a tracker, whose settings are
the table of config.toml there. Nothing here imports a tracker before its sink is made.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from forge_resilience._shared.atomic import write_file
from forge_resilience._shared.problems import invalid
from forge_resilience._shared.toml_files import flatten, read_toml
from forge_resilience.journal import read_json_lines
from forge_resilience.recorder import Row

__all__ = [
    "JsonlSink", "MlflowSink", "TensorBoardSink", "WandbSink", "columns_of", "last_row", "read_rows", "scalars",
]  # fmt: skip

#: Seconds that wandb may upload at the end of a process; what is left is on the disk, for `wandb sync`.
_FINISH_SECONDS = 10.0
#: Limits of MLflow: metrics and params that it takes in one call, and characters of one value.
_METRICS, _PARAMS, _CHARACTERS = 1000, 100, 6000
#: Bytes of rows that wait in memory while the disk takes none: days of training.
_MAX_WAITING = 64 * 2**20


class JsonlSink:
    """One JSON object per line and row. Rows after `resume_step` of an earlier attempt are removed.

    Rows that cannot be written (a full disk, a quota) wait in memory, up to 64 MiB of them, and are written with the
    first row for which there is space; a line on stderr says so once.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        if path.exists():
            rows = (row for row in read_rows(path) if row["step"] <= resume_step)
            write_file(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._waiting = b""
        self._warned = False

    def write(self, row: Row) -> None:
        """Take a row."""
        if len(self._waiting) < _MAX_WAITING:
            self._waiting += (json.dumps(row) + "\n").encode()
        with self._warning_once():
            while self._waiting:  # a write that stops inside of a line goes on there
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]

    def flush(self) -> None:
        """Sync the rows to the disk."""
        with self._warning_once():
            os.fsync(self._file)

    def close(self) -> None:
        """Called after the last row."""
        self.flush()
        os.close(self._file)

    @contextlib.contextmanager
    def _warning_once(self) -> Any:
        try:
            yield
        except OSError as error:
            if not self._warned:
                _warn(f"{self._path}: {error.strerror}; rows wait in memory, training goes on")
            self._warned = True


def read_rows(path: str | os.PathLike[str], schema: int | None = None) -> Iterator[dict[str, Any]]:
    """Read the rows of a metrics file, one after the other; a missing file has none.

    A line that a kill tore is left out. So is JSON that is not a row (an object with a number `step`), with one line on
    stderr after the last row. Another line reports rows whose column `schema` is later than the schema of the caller.
    """
    foreign = later = newest = 0
    for row in read_json_lines(path):
        if not isinstance(row, dict) or type(row.get("step")) not in (int, float):
            foreign += 1
            continue
        if schema is not None and type(own := row.get("schema")) is int and own > schema:
            later, newest = later + 1, max(newest, own)
        yield row

    if foreign:
        _warn(f"{path}: {foreign} lines that are not rows of metrics were left out")
    if later:
        known = f"{newest}, and this version reads up to {schema}"
        fix = "columns may mean other things; read them with a newer version"
        _warn(f"{path}: {later} rows have the schema {known}: {fix}")


def last_row(
    path: str | os.PathLike[str],
    step: float = math.inf,
    column: str = "step",
    schema: int | None = None,
) -> dict[str, Any] | None:
    """Return the last row up to a step with a value in `column`; None without one, and where the file cannot be read."""
    found = None
    with contextlib.suppress(OSError):
        for row in read_rows(path, schema):
            if row["step"] <= step and row.get(column) is not None:
                found = row
    return found


def _warn(message: str) -> None:
    # a closed stderr must not stop a run, nor one that is None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), f"{message}\n".encode())


def scalars(row: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the numbers of a row that are plotted over the steps."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if name not in ("step", "schema")}


class TensorBoardSink:
    """Scalars of each row in `directory`/tensorboard, under their own names. Needs the package tensorboard."""

    def __init__(self, directory: Path, resume_step: int, /) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory / "tensorboard"), purge_step=resume_step + 1)

    def write(self, row: Row) -> None:
        """Take a row."""
        for key, value in scalars(row).items():
            self.writer.add_scalar(key, value, row["step"])
        self.writer.flush()

    def close(self) -> None:
        """Called after the last row."""
        self.writer.close()


class WandbSink:
    """Numbers of each row, and the resolved configuration, in a run of Weights & Biases. Needs the package wandb.

        [metrics.sinks.wandb]
        name = "wandb"
        options = {project = "scaling", entity = "my-lab", group = "1b", tags = ["muon"]}

    project, entity, group, tags and name (default: the run directory's) are those of `wandb.init`. mode is "online"
    or "offline" (default: WANDB_MODE, else online); offline files are in `directory`/wandb, for `wandb sync`. id is
    that of the run; by default the first attempt makes one and keeps it in `directory`/wandb.id, so that each attempt,
    requeued or resumed by hand, goes on with the same run (`resume="allow"`).

    The step of W&B is that of training. Rows after `resume_step` that an earlier attempt has sent are sent again, and
    W&B drops what is not after its last step: the first values stay, which are the same but after a rollback.
    Offline, each attempt has a file of its own with its own rows; `wandb sync` uploads them in order.

    Raises ValueError online without an API key: wandb would ask for one on the terminal.
    Cost: a process of wandb next to rank 0, which ends with the sink or with the process of rank 0.
    """

    def __init__(
        self,
        directory: Path,
        resume_step: int,
        /,
        *,
        project: str = "forge",
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        name: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        id: str | None = None,
    ) -> None:
        import wandb

        asked = mode or os.environ.get("WANDB_MODE", "online")
        if asked == "online" and not wandb.login(prompt=False):
            fix = "run `wandb login`, set WANDB_API_KEY, or use mode = 'offline'"
            raise invalid("mode", "requires", asked, "needs an API key, and has no", fix)
        quiet: Any = dict.fromkeys(("silent", "disable_git", "disable_code"), True)
        given: dict[str, Any] = {"project": project, "entity": entity, "group": group, "tags": tags}
        given["name"] = name or directory.resolve().name
        given["id"] = id or _stored_id(directory / "wandb.id", partial(secrets.token_hex, 4))
        given["settings"] = wandb.Settings(console="off", finish_timeout=_FINISH_SECONDS, **quiet)
        given["reinit"] = "create_new"  # a run of the caller's own stays the current one
        self._run = wandb.init(**given, mode=mode, dir=directory, resume="allow")
        self._run.config.update(read_toml(directory / "config.toml"), allow_val_change=True)

    def write(self, row: Row) -> None:
        """Take a row."""
        self._run.log(scalars(row), step=int(row["step"]))

    def close(self) -> None:
        """Called after the last row."""
        self._run.finish()


class MlflowSink:
    """Numbers of each row as metrics, and the resolved configuration as params, of a run of MLflow. Needs the
    package mlflow-skinny.

        [metrics.sinks.mlflow]
        name = "mlflow"
        options = {experiment = "scaling", tracking_uri = "http://mlflow.my-lab:5000"}

    tracking_uri is by default MLFLOW_TRACKING_URI, else a file store in `directory`/mlruns; run_name is by default
    the run directory's. The run's id is kept in `directory`/mlflow.id, so that each attempt goes on with the same run.

    MLflow can delete no metric: a row of a step that an earlier attempt has sent is left out, so none stands twice and
    the first values stay, which are the same but after a rollback. Params cannot change: one that a later attempt
    changed keeps its first value, and `resume` in events.jsonl says the new one. Characters that MLflow does not
    take in names become `_`. The run is RUNNING until an attempt ends in order, then FINISHED.

    MLflow's own reports of usage are switched off, and its switch for file stores is on, unless the environment says
    otherwise (MLFLOW_DISABLE_TELEMETRY, MLFLOW_ALLOW_FILE_STORE).
    """

    def __init__(
        self,
        directory: Path,
        resume_step: int,
        /,
        *,
        experiment: str = "forge",
        tracking_uri: str | None = None,
        run_name: str | None = None,
        tags: dict[str, str] | None = None,
    ) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        own = (directory / "mlruns").resolve().as_uri()
        self._client = MlflowClient(tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or own)

        def create() -> str:
            found = self._client.get_experiment_by_name(experiment)
            number = found.experiment_id if found else self._client.create_experiment(experiment)
            called = run_name or directory.resolve().name
            return str(self._client.create_run(number, run_name=called, tags=tags).info.run_id)

        self._id = _stored_id(directory / "mlflow.id", create)
        try:
            self._client.update_run(self._id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            fix = "remove the file for a new run, or give the tracking_uri that has it"
            file, rule = directory / "mlflow.id", "is named there and does not exist"
            raise invalid("run", "not_found", self._id, rule, fix, where=file) from error
        data = self._client.get_run(self._id).data
        self._last = data.metrics.get("step", -1)
        self._send_params(read_toml(directory / "config.toml"), data.params)

    def write(self, row: Row) -> None:
        """Take a row."""
        from mlflow.entities import Metric

        step, now = int(row["step"]), int(time.time() * 1000)
        if step <= self._last:
            return
        self._last = step
        # last, as it says in the next attempt that all of the row is there
        values = {**scalars(row), "step": step}
        metrics = [Metric(_mlflow_name(key), float(v), now, step) for key, v in values.items()]
        for chunk in _chunks(metrics, _METRICS):
            self._client.log_batch(self._id, metrics=chunk)

    def close(self) -> None:
        """Called after the last row."""
        self._client.set_terminated(self._id, "FINISHED")

    def _send_params(self, config: Mapping[str, Any], known: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        values = {_mlflow_name(key): str(value)[:_CHARACTERS] for key, value in flatten(config)}
        params = [Param(key, value) for key, value in values.items() if key not in known]
        for chunk in _chunks(params, _PARAMS):
            self._client.log_batch(self._id, params=chunk)


def _stored_id(path: Path, make: Callable[[], str]) -> str:
    """The id in a file, which the first attempt writes; an empty file has none."""
    kept = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if not kept:
        kept = make()
        write_file(path, kept + "\n")
    return kept


def _mlflow_name(key: str) -> str:
    """Replace characters that MLflow does not allow in names."""
    return re.sub(r"[^\w\-. :/]", "_", key)


def _chunks(values: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def columns_of(
    rows: Iterable[Mapping[str, Any]], lists: Callable[[list[Any]], Any] = list
) -> dict[str, list[Any]]:
    """Return name -> values of all rows, None in rows that lack it; `lists` converts a list in a row.

    Memory: those values; rows, of which each has names of its own, are gone by then.
    """
    found = dict[str, list[Any]]()
    for number, row in enumerate(rows):
        for name, value in row.items():
            if name not in found:
                found[name] = [None] * number
            found[name].append(lists(value) if isinstance(value, list) else value)
        if len(row) < len(found):
            for values in found.values():
                if len(values) == number:
                    values.append(None)
    return found

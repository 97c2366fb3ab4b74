"""Sinks that send the rows of a run to Weights & Biases and to MLflow. One run directory is one run there."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from forge_train._shared.atomic import write_file
from forge_train._shared.problems import invalid
from forge_train._shared.toml_files import flatten, read_toml
from forge_train.metrics.columns import scalars
from forge_train.protocols import Row

#: Seconds that wandb may upload at the end of a process; what is left is on the disk, for `wandb sync`.
_FINISH_SECONDS = 10.0
#: What MLflow takes in one call, and of one value.
_METRICS, _PARAMS, _CHARACTERS = 1000, 100, 6000


class WandbSink:
    """Numbers of each row, and the resolved configuration, in a run of Weights & Biases. Needs `forge-train[wandb]`.

        [metrics.sinks.wandb]
        name = "wandb"
        options = {project = "scaling", entity = "my-lab", group = "1b", tags = ["muon"]}

    project, entity, group, tags and name (default: the run directory's) are those of `wandb.init`. mode is "online"
    or "offline" (default: WANDB_MODE, else online); offline files are in `directory`/wandb, for `wandb sync`. id is
    that of the run; by default the first life makes one and keeps it in `directory`/wandb.id, so that each life,
    requeued or resumed by hand, goes on with the same run (`resume="allow"`).

    The step of W&B is that of training. Rows after `resume_step` that an earlier life has sent are sent again, and
    W&B drops what is not after its last step: the first values stay, which are the same but after a rollback.
    Offline, each life has a file of its own with its own rows; `wandb sync` uploads them in order.

    Raises ValueError online without an API key: wandb would ask for one on the terminal.
    Cost: a process of wandb beside rank 0, which ends with the sink or with the process of rank 0.
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
            raise invalid("mode", "requires", asked, "needs an API key, and there is none", fix)
        self._run = wandb.init(
            project=project,
            entity=entity,
            group=group,
            tags=tags,
            name=name or directory.resolve().name,
            id=id or _kept(directory / "wandb.id", partial(secrets.token_hex, 4)),
            resume="allow",
            mode=mode,
            dir=directory,
            reinit="create_new",  # a run of the caller's own stays the current one
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                finish_timeout=_FINISH_SECONDS,
            ),
        )
        self._run.config.update(read_toml(directory / "config.toml"), allow_val_change=True)

    def write(self, row: Row) -> None:
        self._run.log(scalars(row), step=int(row["step"]))

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """Numbers of each row as metrics, and the resolved configuration as params, of a run of MLflow. Needs
    `forge-train[mlflow]` (the package mlflow-skinny).

        [metrics.sinks.mlflow]
        name = "mlflow"
        options = {experiment = "scaling", tracking_uri = "http://mlflow.my-lab:5000"}

    tracking_uri is by default MLFLOW_TRACKING_URI, else a file store in `directory`/mlruns; run_name is by default
    the run directory's. The run's id is kept in `directory`/mlflow.id, so that each life goes on with the same run.

    MLflow can delete no metric: a row of a step that an earlier life has sent is left out, so none stands twice and
    the first values stay, which are the same but after a rollback. Params cannot change: one that a later life
    changed keeps its first value, and `resume` in events.jsonl says the new one. Characters that MLflow does not
    take in names become `_`. The run is RUNNING until a life ends in order, then FINISHED.

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

        self._id = _kept(directory / "mlflow.id", create)
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
        from mlflow.entities import Metric

        step, now = int(row["step"]), int(time.time() * 1000)
        if step <= self._last:
            return
        self._last = step
        # last, as it says in the next life that all of the row is there
        values = {**scalars(row), "step": step}
        metrics = [Metric(_name(key), float(v), now, step) for key, v in values.items()]
        for part in _parts(metrics, _METRICS):
            self._client.log_batch(self._id, metrics=part)

    def close(self) -> None:
        self._client.set_terminated(self._id, "FINISHED")

    def _send_params(self, config: Mapping[str, Any], known: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        values = {_name(key): str(value)[:_CHARACTERS] for key, value in flatten(config)}
        params = [Param(key, value) for key, value in values.items() if key not in known]
        for part in _parts(params, _PARAMS):
            self._client.log_batch(self._id, params=part)


def _kept(path: Path, make: Callable[[], str]) -> str:
    """The id in a file, which the first life writes; an empty file has none."""
    kept = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if not kept:
        kept = make()
        write_file(path, kept + "\n")
    return kept


def _name(key: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", key)


def _parts(values: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]

"""Alerts: a command or a webhook for events of the journal, from a process of its own that outlives the run's faults."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forge_resilience._shared.atomic import write_file
from forge_resilience._shared.fields import Checked, field
from forge_resilience._shared.jsonl import read_log_from
from forge_resilience._shared.problems import Problem
from forge_resilience.journal import Journal

__all__ = ["FOLLOWED", "Alerts", "AlertsConfig", "follow"]

FOLLOWED = "FORGE_ALERTS"
"""Variable that a process sets for the ranks that it starts, if it follows the journal for them."""

_LOOK_SECONDS = 0.25
# bounds the time that the follower outlives its run, with any number of alerts left to send
_DRAIN_SECONDS = 30.0
_BACKOFF_SECONDS = 1.0  # doubled after each failed attempt, up to timeout_seconds
_MOST_OF_A_KIND = 10  # until the next restart; a run that spikes in each step would send thousands
_FAILED = "alert_failed"
_WEBHOOK = re.compile(r"https?://[^/\s]+\S*|\$\w+")
_WORDS = ("step", "rank", "cause", "signal", "tensor", "error")


@dataclass(frozen=True)
class AlertsConfig(Checked):
    """The command or webhook that gets alerts, and the events."""

    command: str | None = None
    """program for each event: it gets a sentence as its last argument and the event as JSON on stdin"""
    webhook: str | None = None
    """URL that gets a POST of {text, event} as JSON; '$NAME' is read from the environment, so that no secret is in
    a file"""
    events: tuple[str, ...] = (
        *("stop", "hang", "stall", "spike", "rollback", "no_progress", "mismatch", "health"),
        *("fault", "save_failed"),
    )
    """names of the events of events.jsonl"""
    timeout_seconds: float = field(10.0, between=(0, 600), positive=True)
    """seconds after which a command is killed and a webhook given up"""
    attempts: int = field(3, between=(1, 100))
    """attempts for each event"""

    def _problems(self) -> Iterator[Problem]:
        # No problem shows the command or the webhook, which may contain secrets.
        if self.command is not None and not _words_of(self.command):
            rule = "must be a program with its arguments, quoted as in a shell"
            yield Problem("command", "words", ..., rule, "use 'notify.sh --to me'")
        if self.webhook is not None and not _WEBHOOK.fullmatch(self.webhook):
            rule = "must be an http(s) URL or '$NAME' of a variable"
            yield Problem("webhook", "format", ..., rule, "use '$SLACK_URL'")
        if not self.events or not all(re.fullmatch(r"\w+", name) for name in self.events):
            rule, fix = "must be names of events", "use ['stop', 'hang']"
            yield Problem("events", "format", list(self.events), rule, fix)

    @property
    def is_on(self) -> bool:
        """Whether there is a command or a webhook."""
        return self.command is not None or self.webhook is not None


def _words_of(command: str) -> list[str]:
    """Split a command into words; [] if its quotes do not match."""
    with contextlib.suppress(ValueError):
        return shlex.split(command)
    return []


class Alerts:
    """Send alerts for new events of a journal while open; no failure reaches the run.

        with Alerts("runs/a/events.jsonl", AlertsConfig(webhook="$SLACK_URL")):
            train()

    A process follows the file from its present end, or from where the last one stopped (a number in `.alerts`
    next to the journal): what a supervisor wrote about ranks that it killed is sent after their restart. Each event is
    sent once, to both; ten of a kind at most until the next restart. Each try is limited in time, a command is killed with
    its children; the last failure is an event `alert_failed` without the URL or the command. It ends with this
    process, killed or not, after at most 30 s for what is left; `close` waits for it for `close_seconds`.
    Cost: one small process; nothing in this one.
    """

    def __init__(
        self, journal: str | os.PathLike[str], config: AlertsConfig, *, close_seconds: float = 10.0
    ) -> None:
        self._journal, self._config = Path(journal), config
        self._close_seconds = close_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Alerts:
        """Start the process, if there is a command or a webhook."""
        if not self._config.is_on:
            return self
        size = self._journal.stat().st_size if self._journal.exists() else 0
        order = {"journal": str(self._journal.absolute()), "offset": size, "parent": os.getpid()}
        order["config"] = asdict(self._config)

        try:
            self._process = _start([sys.executable, "-m", "forge_resilience.alerts"])
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                print(f"alerts are not sent: {error}", file=sys.stderr)
        return self

    def __exit__(self, *exc: object) -> None:
        """Let the process send what is left, and end; it is left running if that takes longer than `close_seconds`."""
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._close_seconds)


class _Follower:
    """Follows a journal in the alerts process: reads new lines and sends the configured events.

    After each event the offset is stored in JOURNAL.alerts, where the next follower continues. After the end of the run,
    `deadline` limits the alerts that are left."""

    def __init__(self, journal: Path, config: AlertsConfig, offset: int) -> None:
        self.journal, self.config = journal, config
        self.state = journal.with_name(journal.name + ".alerts")
        self.offset = self._resume(offset)
        self.sent: Counter[str] = Counter()
        # None until the run has ended, as until then only timeout_seconds limits a delivery
        self.deadline: float | None = None

    def _resume(self, offset: int) -> int:
        """Return the offset where the last follower stopped, if it is in this file, else `offset`."""
        with contextlib.suppress(OSError, ValueError):
            kept = int(self.state.read_text())
            return kept if 0 <= kept <= offset else offset
        return offset

    def run(self, ended: Callable[[float], bool]) -> None:
        """Follow until `ended(seconds)`, which waits so long, and then send what is left."""
        while not ended(_LOOK_SECONDS):
            self._send_new()
        self.deadline = time.monotonic() + _DRAIN_SECONDS
        self._send_new()

    def _send_new(self) -> None:
        """Send alerts for the events after `offset`, and store the new offset."""
        new: list[tuple[Any, int]] = []
        # it cannot be read now, so the next look tries again, or it is no regular file
        with contextlib.suppress(OSError, ValueError):
            new += read_log_from(self.journal, self.offset)
        for event, end in new:
            name = str(event.get("event")) if isinstance(event, dict) else ""
            if name in self.config.events and name != _FAILED:
                self.sent[name] += 1
                if self.sent[name] <= _MOST_OF_A_KIND:
                    self._send(event, is_last=self.sent[name] == _MOST_OF_A_KIND)
            self.offset = end
            with contextlib.suppress(OSError):
                write_file(self.state, str(end))

    def _send(self, event: dict[str, Any], is_last: bool) -> None:
        """Send one alert by command and webhook; a failure is an event."""
        text = sentence(self.journal.parent, event)
        if is_last:
            text += f" (more events of this kind are in {self.journal.name} only)"
        ways = {"command": self._run_command, "webhook": self._post}
        for way, send in ways.items():
            if (to := getattr(self.config, way)) is None:
                continue
            problem, attempts = self._try(partial(send, to, text, event))
            if problem:
                fields = {"of": event.get("event"), "way": way, "attempts": attempts}
                Journal(self.journal).record(_FAILED, **fields, cause=problem)

    def _try(self, attempt: Callable[[], str]) -> tuple[str, int]:
        """Try until one attempt succeeds; return (problem of the last attempt or "", number of attempts)."""
        problem = "the run ended before it could be sent"
        for number in range(self.config.attempts):
            if number:
                time.sleep(min(_BACKOFF_SECONDS * 2 ** (number - 1), self._seconds_left()))
            if not self._seconds_left():
                return problem, number
            try:
                problem = attempt()
            except Exception as error:  # its text may hold the URL or the command
                problem = type(error).__name__
            if not problem:
                break
        return problem, number + 1

    def _seconds_left(self) -> float:
        """Seconds that a delivery may take: the time limit, or less after the end of the run."""
        limit = self.config.timeout_seconds
        return limit if self.deadline is None else min(limit, max(0.0, self.deadline - time.monotonic()))  # fmt: skip

    def _run_command(self, command: str, text: str, event: dict[str, Any]) -> str:
        """Run the user's command; the problem, or ""."""
        process = _start([*shlex.split(command), text])
        try:
            process.communicate(json.dumps(event).encode(), timeout=self._seconds_left())
        except subprocess.TimeoutExpired:
            # the process group, because children of the command would outlive it
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"took longer than {self.config.timeout_seconds:g} s and was killed"
        return f"ended with code {process.returncode}" if process.returncode else ""

    def _post(self, webhook: str, text: str, event: dict[str, Any]) -> str:
        """POST to the webhook; the problem, or ""."""
        url = os.environ.get(webhook[1:], "") if webhook.startswith("$") else webhook
        if not url:
            return f"the variable {webhook[1:]} is not set"
        body = json.dumps({"text": text, "event": event}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "forge-resilience"}
        request = urllib.request.Request(url, body, headers)
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            with opener.open(request, timeout=self._seconds_left()):
                return ""
        except urllib.error.HTTPError as error:
            return f"answered {error.code}"
        except urllib.error.URLError as error:
            return f"cannot be reached: {type(error.reason).__name__}"


def follow(
    journal: Path, config: AlertsConfig, rank: int = 0
) -> contextlib.AbstractContextManager[object]:
    """Follow a journal while open: on rank 0, unless the process that started the ranks does."""
    return contextlib.nullcontext() if rank or FOLLOWED in os.environ else Alerts(journal, config)


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a silent process that reads stdin; a Ctrl-C is for the run, and this process reports it."""
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
    )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a POST would become a GET, and another server would get the text."""

    def redirect_request(self, *args: Any) -> None:
        return None


def sentence(folder: Path, event: dict[str, Any]) -> str:
    """Return the text of an alert: `runs/a: hang, step 40, rank 3, cause ...`."""
    words = [f"{word} {event[word]}" for word in _WORDS if event.get(word) not in (None, "")]
    return f"{folder}: {', '.join([str(event.get('event')), *words])}"


def _main() -> int:
    """Follow the journal that the first line of stdin names, until stdin closes or the parent is gone."""
    # ignored, because a run that gets it too may record more events: its end is the end of stdin
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    order = json.loads(sys.stdin.buffer.readline())
    config = AlertsConfig(**{**order["config"], "events": tuple(order["config"]["events"])})

    def ended(seconds: float) -> bool:
        readable, _, _ = select.select([sys.stdin], [], [], seconds)
        return bool(readable) or os.getppid() != order["parent"]

    _Follower(Path(order["journal"]), config, order["offset"]).run(ended)
    return 0


if __name__ == "__main__":
    sys.exit(_main())

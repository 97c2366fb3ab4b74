"""The result of a probe, in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK = "ok"
WARN = "warn"
MISSING = "missing"
BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """What a probe found: `state` is ok, warn (runs can go on), missing (something that is not here), or broken (runs
    cannot go on, or compute wrong).

    Usage: `if finding.state == BROKEN: print(finding)`.
    """

    what: str
    state: str
    value: str
    rule: str = ""
    fix: str = ""

    @property
    def detail(self) -> str:
        """The value, and the rule that it breaks."""
        return f"{self.value}; {self.rule}" if self.rule else self.value

    def __str__(self) -> str:
        return f"{self.what}: {self.detail}" + (f"; {self.fix}" if self.fix else "")

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without empty fields."""
        return {name: value for name, value in asdict(self).items() if value}

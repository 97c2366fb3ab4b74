"""Columns of a run as comma-separated values."""

import csv
from pathlib import Path
from typing import Any


class Columns:
    """Writes <run.dir>/columns.csv; rows after the step that a run goes on from are taken out first."""

    def __init__(self, directory: Path, resume_step: int, *, columns: str) -> None:
        self.names, path = columns.split(), directory / "columns.csv"
        old = list(csv.DictReader(path.open())) if path.exists() else []
        self.file = path.open("w", newline="")
        self.rows = csv.DictWriter(self.file, ["step", *self.names], extrasaction="ignore")
        self.rows.writeheader()
        for row in old:
            if int(row["step"]) <= resume_step:
                self.rows.writerow(row)
        self.file.flush()

    def write(self, row: dict[str, Any]) -> None:
        self.rows.writerow(row)
        self.file.flush()

    def close(self) -> None:
        self.file.close()

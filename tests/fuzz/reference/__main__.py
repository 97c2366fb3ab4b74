"""`python -m tests.fuzz.reference FOLDER [STEPS]`: train the case of a folder."""

import sys
from pathlib import Path

from .train import train

if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)

"""The files beside this one are modules of each other and of the tests, as for run_cells.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

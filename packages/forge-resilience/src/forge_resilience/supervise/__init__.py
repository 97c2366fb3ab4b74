"""A supervisor of local ranks of any program: it names a hang, ends all processes, and starts them again.

`python -m forge_resilience.supervise --nproc 4 -- python train.py`; no torch is imported.
"""

from forge_resilience.exit_codes import FINAL_CODES
from forge_resilience.supervise.guard import run_guarded
from forge_resilience.supervise.supervisor import Result, supervise
from forge_resilience.supervise.watch import Late, Watch, WatchConfig

__all__ = ["FINAL_CODES", "Late", "Result", "Watch", "WatchConfig", "run_guarded", "supervise"]

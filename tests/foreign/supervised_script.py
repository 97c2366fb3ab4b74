"""A plain script under the supervisor, which is killed in step 2 of its first attempt: supervised_script.py FOLDER"""

import sys
from pathlib import Path

from forge_resilience import WatchConfig, supervise

SCRIPT = """
import os, sys
from pathlib import Path
state = Path(sys.argv[1], "state")
for step in range(int(state.read_text()) if state.exists() else 0, 4):
    if step == 2 and os.environ["FORGE_LIFE"] == "0":
        os.abort()
    state.write_text(str(step + 1))
    with Path(sys.argv[1], "steps").open("a") as file:
        file.write(f"{step} ")
"""
command = [sys.executable, "-c", SCRIPT, sys.argv[1]]
result = supervise.supervise(command, config=WatchConfig("restart"))
print(result.code, result.attempts, Path(sys.argv[1], "steps").read_text())
sys.exit(result.code)

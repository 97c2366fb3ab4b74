"""forge_ckpt in the loops of other libraries, without another package of Forge."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(*arguments: object) -> str:
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.lane("test")
def test_a_reshard_tool_for_checkpoints_of_dcp(tmp_path: Path) -> None:
    assert run(HERE / "dcp_reshard.py", tmp_path).splitlines()[-1] == "equal 4"


@pytest.mark.lane("test")
def test_other_packages_cannot_be_imported() -> None:
    program = "from only import only; only('forge_ckpt'); import forge_ckpt.hf, forge_core"
    with pytest.raises(AssertionError, match="ModuleNotFoundError: forge_core"):
        run("-c", program)


@pytest.mark.lane("test")
def test_names_are_imported_at_their_first_use() -> None:
    program = """
import sys, types, forge_ckpt
assert "torch" not in sys.modules
assert set(forge_ckpt.__all__) <= set(dir(forge_ckpt))
for name in forge_ckpt.__all__:
    assert getattr(forge_ckpt, name).__name__ == name
assert isinstance(forge_ckpt.hf, types.ModuleType)
assert not hasattr(forge_ckpt, "nothing") and not hasattr(forge_ckpt, "_nothing")
import pydoc
text = pydoc.plain(pydoc.render_doc(forge_ckpt))
assert all(name in text for name in forge_ckpt.__all__)
"""
    run("-c", program)

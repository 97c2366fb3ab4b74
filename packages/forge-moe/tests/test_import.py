"""Importing forge_moe loads torch, the standard library and itself."""

import subprocess
import sys

import pytest

import forge_moe

pytestmark = pytest.mark.lane("test")

CODE = """
import sys
{first}
before = set(sys.modules)
import forge_moe
new = set(sys.modules) - before
tops = {{n.partition(".")[0] for n in new}} - {{"forge_moe", "torch"}} - set(sys.stdlib_module_names)
print(sorted(tops), sum(n.startswith("torch") for n in new))
"""


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_nothing_beyond_torch_is_loaded() -> None:
    code = CODE.format(first="import torch")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, parts_of_torch = out.stdout.rsplit(" ", 1)
    assert names == "[]"
    assert int(parts_of_torch) < 20  # not the compiler, not DTensor


def test_public_names_exist_are_few_and_documented() -> None:
    assert len(forge_moe.__all__) <= 25
    assert len(set(forge_moe.__all__)) == len(forge_moe.__all__)
    for name in forge_moe.__all__:
        assert getattr(forge_moe, name).__doc__, name

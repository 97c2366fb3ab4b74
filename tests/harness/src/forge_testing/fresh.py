"""A fresh interpreter."""

import subprocess
import sys


def modules_loaded_by(package: str, after: str = "sys") -> list[str]:
    """The modules that `import package` loads, next to those that `import after` has loaded."""
    code = f"import sys, {after}; before = set(sys.modules); import {package}; print(*(set(sys.modules) - before))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()


def packages_of(modules: list[str]) -> set[str]:
    """The packages of modules, those of the standard library left out."""
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names

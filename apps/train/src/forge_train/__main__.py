"""`python -m forge_train` is `forge-train`."""

from forge_train.cli import main

main()

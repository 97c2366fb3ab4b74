"""What a layer costs and whether it is exact when routing goes wrong: `python -m forge_moe.lab --help`."""

"""The dense decoder-only transformer and its parts."""

"""Copies of scripts/shared: one text for all packages."""

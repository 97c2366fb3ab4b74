"""Runs Forge training jobs from a TOML file."""

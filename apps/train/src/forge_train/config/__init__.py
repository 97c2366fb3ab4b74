"""The configuration of a job: layers, types, checks."""

"""Hugging Face folders in and out of runs: the verbs import and export."""

"""Sources of tokens, and their checks."""

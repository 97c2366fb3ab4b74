"""Optional features of a run, and hooks of users."""

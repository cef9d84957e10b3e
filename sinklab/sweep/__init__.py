"""Sweeps: rows and seeds, each a run in its own process."""

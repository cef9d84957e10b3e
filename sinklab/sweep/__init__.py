"""Sweeps: rows and seeds, each run in a process of its own."""

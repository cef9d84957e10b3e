"""Sweeps over rows and seeds, with a subprocess for each run."""

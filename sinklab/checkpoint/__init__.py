"""Checkpoints: saving, retention, verification, and restoring."""

"""Checkpoints: what is saved, known to be sound, and read again."""

"""Configuration: the frozen dataclasses of a run, their validation, and seeds."""

"""Command line: one module per command, and modules that several commands share."""

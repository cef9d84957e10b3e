"""Ids -> files that are written once, each with its digest -> arrays of ids."""

"""Parallelism: device mesh, shardings, and collectives."""

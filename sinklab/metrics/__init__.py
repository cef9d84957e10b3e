"""Metrics of a forward pass, for NumPy and JAX arrays; `registry` lists all of them."""

"""Arrays of a forward pass -> named numbers, in NumPy and in JAX alike. `table` has all that is measured."""

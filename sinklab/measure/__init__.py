"""Arrays of a capture -> numbers. Every function works on NumPy and on JAX arrays, with any leading axes."""

"""Pallas kernels for TPU and GPU: sums over keys and their gradients, on arrays of shape BHTK."""

"""Attention on arrays: similarities, normalizers, masks, biases, and the backends that compute them."""

"""Attention on arrays: A = weight(s) / Z(sum of mass(s)), over each query's interval of keys."""

"""Texts -> ids of tokens."""

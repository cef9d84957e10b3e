"""Training: a pure step on a plain state, and the loop around it."""

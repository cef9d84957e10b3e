"""Training: the step, the loop around it, evaluation, and warm starts."""

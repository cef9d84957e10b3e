"""What an accelerator computes of attention: two sums over the text, and their gradients. Arrays come heads first."""

"""The language model: flax.nnx modules whose parameters name their logical axes."""

"""The language model: flax.nnx modules that hold parameters and name their axes."""

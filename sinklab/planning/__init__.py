"""Planning: compilation of a run for devices that are not attached."""

"""Planning: compilation for devices that are not attached, memory and time estimates, layout search."""

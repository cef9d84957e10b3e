"""Planning: compilation for devices that are not attached, memory and time estimates, and layout search."""

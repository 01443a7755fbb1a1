"""The order of things: from a function and a mesh to a plan."""

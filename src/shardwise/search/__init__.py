"""Finding decisions: the problem, and methods that solve it."""

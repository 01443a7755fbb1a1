"""Decisions to a sharded program: the storage rule, the compute rule, reshards."""

"""Carrying a plan out: the function rewritten with sharding constraints, as few as Shardy needs."""

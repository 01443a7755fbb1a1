"""The cost of many states, fast: the cost model's terms in tables."""

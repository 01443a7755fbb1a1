"""Factor rules of primitives, by family; see :mod:`shardwise.rules.registry`."""

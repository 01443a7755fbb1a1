"""The JAX front end: converts a function to a :class:`~shardwise.ir.program.Program`."""

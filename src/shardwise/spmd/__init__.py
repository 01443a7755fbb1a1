"""The device-local program: a lowered program as a JAX function on local blocks, with its collectives written out."""

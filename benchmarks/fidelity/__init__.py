"""The cost model against XLA's TPU compiler, on many programs, strategies and topologies."""

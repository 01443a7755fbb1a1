"""The constraints path: what XLA's partitioner is asked for, and what is known about it."""

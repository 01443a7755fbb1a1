"""The constraints path: what is stated to XLA's partitioner, and its quirks."""

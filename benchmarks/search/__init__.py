"""The search against experts, exhaustive search and other methods."""

"""The list of programs of other packages, without any of them installed."""

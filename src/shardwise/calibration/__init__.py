"""Measuring machines: hardware profiles from readings."""

"""Strategies as short lists of decisions, composed in order, separate from model code."""

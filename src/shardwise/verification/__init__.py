"""Compares a plan with the compiled program: collectives, memory, cycle estimates and results."""

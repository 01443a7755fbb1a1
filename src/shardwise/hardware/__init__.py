"""Meshes, hardware profiles, topologies, and what collectives cost on them."""

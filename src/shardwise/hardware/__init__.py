"""Meshes and, later, hardware profiles and topologies."""

"""From decisions to shardings and collectives, and what they cost."""

"""Plans: what was decided, as data that can be read, saved and compared."""

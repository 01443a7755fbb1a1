"""The static analysis: names, colors, conflicts, compatibility sets, groups."""

"""Deliberately broken backends: for every rule at least one, which the suite must catch."""

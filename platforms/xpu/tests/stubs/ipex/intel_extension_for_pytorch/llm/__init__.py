"""A package of the stub."""

"""Vendor libraries that are not here: their signatures as data, their answers by the reference."""

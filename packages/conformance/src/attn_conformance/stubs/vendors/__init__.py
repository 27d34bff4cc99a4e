"""Signatures of vendors' releases, a module for each family of libraries."""

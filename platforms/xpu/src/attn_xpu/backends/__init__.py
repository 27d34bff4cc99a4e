"""Backends of this platform alone, one file each; the portable ones live in attn-torch."""

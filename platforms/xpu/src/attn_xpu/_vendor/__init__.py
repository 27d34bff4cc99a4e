"""The only place that imports Intel's libraries and those built on them, one file each."""

"""The only place that imports NVIDIA's libraries and those built on them, one file each."""

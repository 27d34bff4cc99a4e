"""The only place that imports AMD's libraries and those built on ROCm, one file each."""

"""A page about one run or several: one HTML file without references to anything else."""

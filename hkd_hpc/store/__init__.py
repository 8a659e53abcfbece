"""HDF5 files that are intact or absent: the run's folder, its record, its lock. Rank 0 alone writes them."""

"""Workloads J and S in other systems, for tools.bench.peers; each script runs in its system's environment."""

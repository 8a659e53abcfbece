"""Jobs J and S in other systems, for tools.bench_peers; each script runs in the environment that has its system."""

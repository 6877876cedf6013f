"""`quire bench`: workloads, clocks and statistics for throughput, latency and the control plane."""

"""Simulator and workload library: workloads, hardware and models as data, a cost model, a virtual clock. No torch."""

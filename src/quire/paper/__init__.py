"""The paper's evaluation and what plans capacity: workloads, hardware and models as data, a simulator. No torch."""

"""Optional metrics: what engines and a server have done, as a page for Prometheus and as objects for Python."""

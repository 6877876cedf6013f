"""Optional deployment on Ray Serve: ingress replicas for HTTP, engine replicas that compute. Needs `quire[ray]`."""

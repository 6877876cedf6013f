"""Optional fleet: several engines behind one server, the routing of requests to them, and their restarts."""

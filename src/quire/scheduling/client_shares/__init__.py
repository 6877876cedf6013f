"""Optional shares of clients: fair order of admission, and limits on the KV blocks of one client."""

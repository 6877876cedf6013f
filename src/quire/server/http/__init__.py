"""HTTP/1.1 below the routes: sockets, the protocol and its limits, the application, the log line of each request."""

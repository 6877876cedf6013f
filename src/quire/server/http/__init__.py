"""HTTP/1.1 below the routes: sockets, the protocol and its limits, the middleware, the log line of each request."""

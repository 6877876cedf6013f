"""Images of requests: parts of bodies, fetching, and decoding in a process with limits."""

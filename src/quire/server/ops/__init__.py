"""Operation of a server process: start, signals, supervision of the engine, logs and metrics."""

"""Engine process and its clients: start, frames over a socket pair, streams of outputs, stalls, forecasts."""

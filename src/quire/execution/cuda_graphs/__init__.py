"""CUDA graphs of steps, and the inputs of steps in one buffer."""

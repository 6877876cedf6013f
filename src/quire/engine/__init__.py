"""Request lifecycle: checked input, the step loop, text. Joins the two towers below, scheduling and execution.

The server and `LLM` reach execution through this layer alone; sim, paper and cli measure parts of the towers directly.
"""

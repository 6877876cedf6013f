"""Who runs in this step, with how many tokens: pure Python, no torch, no clock, no I/O."""

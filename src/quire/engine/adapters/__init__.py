"""LoRA adapters: PEFT folders, read in a thread, kept in memory, and applied to the rows of their requests."""

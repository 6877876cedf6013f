"""Arguments and flags of vLLM, by name, and what each of them does here, in one table.

The command line, `LLM` and docs/coming-from-vllm.md are served from it. The table has the names of vLLM 0.33 and of
versions before it.
"""

"""From logits to tokens: masks, penalties, filters, draws and logprobs, over rows of a batch.

A row's token and logprobs are a function of that row's logits, parameters, seed and known tokens alone, bit for bit:
never of the rows beside it. Nothing here remembers a step, so preempting a sequence and computing it again changes
nothing.
"""

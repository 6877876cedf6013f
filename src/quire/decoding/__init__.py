"""Decoding, logits to tokens: masks, penalties, filters, draws and logprobs over the rows of a batch.

A row's token and logprobs are a function of its own logits, parameters, seed and known tokens, bit for bit, whatever
the other rows are. No state is kept between steps, so preemption and recomputation change nothing.
"""

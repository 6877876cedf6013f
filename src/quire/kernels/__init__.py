"""Functions of tensors, one op per module: a plain `reference` and faster back ends behind one signature.

Nothing here knows a request, a model or a plan of the scheduler. `choice.choose_back_end` picks once, at start.
"""

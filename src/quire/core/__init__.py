"""Plain data that layers share: requests, sequences, plans, results, parameters, errors.

Nothing here computes, waits or allocates; every other layer may import it, and it imports none of them.
"""

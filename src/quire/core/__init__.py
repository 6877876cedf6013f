"""Plain data that floors share: requests, sequences, plans, results, parameters, errors.

Nothing here computes, waits or allocates; every other floor may import it, and it imports none of them.
"""

"""What `bench/peers.py` is made of: engines in processes of their own, turns, calibration, the table."""

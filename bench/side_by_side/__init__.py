"""Parts of `bench/peers.py`: engines in processes of their own, turns, calibration, the table."""

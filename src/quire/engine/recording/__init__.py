"""Recording of an engine's scheduling decisions, and their replay."""

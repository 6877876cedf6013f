"""Anthropic's Messages API: one folder, request in, events out. Without it its routes answer 404."""

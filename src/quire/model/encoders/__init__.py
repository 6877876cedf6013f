"""Optional encoders: models that give vectors of texts, and no next tokens."""

"""OpenAI's routes: what they take, what they answer, and the streams in between."""

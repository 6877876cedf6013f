"""OpenAI's dialect: request models and their checks, and the JSON of responses."""

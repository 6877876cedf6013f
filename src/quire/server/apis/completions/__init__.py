"""OpenAI's completions and chat completions: routes, bodies and their checks, and the JSON of responses."""

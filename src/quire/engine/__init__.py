"""A request's life: from validated input over the step loop to text. The only floor that sees both towers below."""

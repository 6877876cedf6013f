"""Parts of the API that do not depend on its dialect: running a request, JSON in slices, sending responses."""

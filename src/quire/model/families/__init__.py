"""Optional model families: decoders that are no Llama, and relatives of it with parts of their own."""

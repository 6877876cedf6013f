"""Embeddings and scores over HTTP: /v1/embeddings, /pooling, /score and /rerank."""

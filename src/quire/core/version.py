"""The version of Quire, for layers that must not import the package itself: it leads to `LLM`, and that to NumPy."""

__version__ = "0.1.0"

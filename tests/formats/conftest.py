"""The fixtures of tests that run a decoder."""

from support.paged_runner import back_end, one_thread, paged_runner

__all__ = ["back_end", "one_thread", "paged_runner"]

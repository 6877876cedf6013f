"""Anthropic's Messages API: its bodies, their conversion to chats, and its responses and events."""

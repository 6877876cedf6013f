"""Pages for a browser: the start page, the chat, and the files that all pages load."""

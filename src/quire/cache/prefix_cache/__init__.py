"""Optional prefix cache: blocks that stay when their sequences end, are found again, and can be pinned."""

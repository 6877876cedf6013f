"""Free memory of the host."""

import os

HOST_KV_SHARE = 0.4  # share of free memory for the KV cache; the contract's default


def free_memory_bytes() -> int:
    """Return the memory that can be allocated without swapping, in bytes."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: count the free pages
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

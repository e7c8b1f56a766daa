"""How a measured step gets from its device into the ring without making training wait."""

"""What demo and tests need around mp_agent; not part of the package."""

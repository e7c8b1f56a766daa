"""The probe: hooks and statistics inside each rank. The only part that imports torch."""

"""The bytes of a ring's file: layout, slots, and encoding."""

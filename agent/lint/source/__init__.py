"""Reads source files: encodings, notebooks, suppression comments."""

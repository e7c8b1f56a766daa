"""Reads the rings of this node step by step, and tracks which ranks are alive."""

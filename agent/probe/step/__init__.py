"""The step under way: what was observed of it, where it ends, when its layers are measured."""

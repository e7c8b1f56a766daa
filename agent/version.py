"""The version of mp_agent, where parts that must not import torch can read it."""

__version__ = "0.1.0"

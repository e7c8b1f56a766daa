"""The conditions judged inside the agent: tracking, messages and notification."""

"""Sends requests by the official exporters, over HTTP or gRPC, and detects what is refused."""

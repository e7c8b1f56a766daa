"""Output of the agent: snapshots, OTLP pushes, service discovery."""

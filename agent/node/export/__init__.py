"""What leaves the agent: snapshots, OTLP pushes, service discovery."""

"""Converts snapshots and condition events to OpenTelemetry metrics data, log records and spans."""

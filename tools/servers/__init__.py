"""Real Prometheus, Alertmanager, VictoriaMetrics and a webhook receiver, for demo and tests."""

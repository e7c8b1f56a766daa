"""The one port: /metrics, /healthz, the status page, and who may connect."""

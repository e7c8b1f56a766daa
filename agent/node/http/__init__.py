"""The HTTP server on the one port: /metrics, /healthz, the status page, access control."""

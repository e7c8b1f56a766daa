"""Grafana dashboards, rendered from the catalogs of metrics and conditions."""

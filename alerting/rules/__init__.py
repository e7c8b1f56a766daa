"""`mp-agent rules`: the Prometheus rule file and its unit tests, from the conditions catalog."""

"""Pushes snapshots and critical conditions by OTLP; needs the extra `mp-agent[otlp]`.

A Snapshot becomes OpenTelemetry metrics data and is sent by its official exporters. OpenTelemetry's
instruments are not used: they have no observable histogram, silently drop attribute sets beyond a
limit and non-finite values, and use the start of the process as that of every counter.
"""

"""Pushes snapshots and critical conditions by OTLP; needs the extra `mp-agent[otlp]`.

A Snapshot becomes OpenTelemetry's own metrics data and goes out through its official exporters.
Its instruments are not in between: they know no observable histogram, drop attribute sets beyond
a limit and non-finite values without a word, and take a process's start for a counter's.
"""

"""`mp-agent export`: what a run's history holds, as a file for other programs.

`samples.py` makes samples of a flight record or of a Prometheus, as `mp_agent.backtest.readers`
read them; `formats.py` writes them. Metrics while a run goes on are the work of
`mp_agent.exporters`.
"""

"""The conditions judged inside the process, on every step, without Prometheus.

A second reading of the same records that `promql` renders as rules. Both come to the same result
on the same samples, but for what follows from having more of them:

* Here a reading is taken on every step, there one per scrape: what lies between two scrapes is
  seen here. A range of time reaches up to one period (a 24th of the shortest) further back.
* The increase of a counter is exact. Prometheus extrapolates it to the ends of the range where
  samples do not reach them, and sees no change from a sample before the range to the first in it.
* A series is there as long as readings hold it, and gone with the first that does not. Prometheus
  looks back 5 minutes for one whose end is not marked.
* What node agents count of themselves (MpAgentTelemetryDegraded) is read here of the root's node
  alone; Prometheus scrapes all of them.
* A counter that was first seen and was reset within one window counts both parts; there, the last.
"""

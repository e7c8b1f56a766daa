#!/bin/bash
# Removes the targets of jobs that died without removing them, for cron, a systemd timer or
# EpilogSlurmctld. A root agent refreshes its file every 15 s and removes those that stand still for
# ten minutes; this script removes those of other users, and those of the last job.
set -euo pipefail

directory=${1:-/shared/mp_agent/targets}
find "$directory" -maxdepth 1 -type f -mmin +"${2:-10}" \
  \( -name 'mp_agent-*.json' -o -name '.*.partial' \) -delete

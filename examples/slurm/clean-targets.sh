#!/bin/bash
# Removes the targets of jobs that died without removing them, for cron, a systemd timer or
# EpilogSlurmctld. A root agent refreshes its file every 15 s and removes those that stand still for
# ten minutes; what nobody else may remove, or what the last job left, is removed here.
set -euo pipefail

directory=${1:-/shared/mp_agent/targets}
find "$directory" -maxdepth 1 -type f -mmin +"${2:-10}" \
  \( -name 'mp_agent-*.json' -o -name '.*.partial' \) -delete

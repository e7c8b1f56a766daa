"""`mp-agent check`: finds mistakes of mixed precision and of training loops before code runs.

From the command to a finding: `command` → `api` → `discovery` (which files) → `runner` (processes)
→ `source` (text, comments, notebooks) → `interpret` (names, values and control flow of a function,
as one trace of operations) → `rules` (what is wrong with a trace) → `report`, `fix`. No torch.
"""

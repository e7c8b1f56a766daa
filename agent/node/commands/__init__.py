"""What the user types: `mp-agent node`, `mp-agent exec`, `mp-agent dump`, `mp-agent postmortem`."""

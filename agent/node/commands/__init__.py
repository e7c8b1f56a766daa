"""The commands `mp-agent node`, `mp-agent exec`, `mp-agent dump` and `mp-agent postmortem`."""

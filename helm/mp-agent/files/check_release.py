"""What `helm test` runs: are the settings usable, does Prometheus take the release's objects."""

import json
import os
import sys
import urllib.request

from mp_agent.settings import load_settings

TRAP = "does it select the labels of this release's objects (additionalLabels, namespaces)?"


def main() -> None:
    """Exit with what is wrong; PROMETHEUS_URL, POD_MONITOR and RULES say what to look for."""
    _, ignored = load_settings()
    if ignored:
        sys.exit(f"{ignored} of the settings are wrong; see above")
    url = os.environ.get("PROMETHEUS_URL", "").rstrip("/")
    if url and os.environ.get("RULES"):
        groups = asked(f"{url}/api/v1/rules?type=alert")["groups"]
        names = [rule["name"] for group in groups for rule in group["rules"]]
        if not any(name.startswith("MpAgent") for name in names):
            sys.exit(f"{url} has none of the alert rules: {TRAP}")
    monitor = os.environ.get("POD_MONITOR", "")
    if url and monitor:
        pools = asked(f"{url}/api/v1/scrape_pools")["scrapePools"]
        if not any(pool.startswith(f"podMonitor/{monitor}/") for pool in pools):
            sys.exit(f"{url} does not know the PodMonitor {monitor}: {TRAP}")
    print("ok")


def asked(url: str) -> dict:
    """Return `data` of Prometheus' answer; exit when there is none."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)["data"]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{url}: {error}")


main()

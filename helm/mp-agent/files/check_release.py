"""What `helm test` runs: are the settings usable, does Prometheus take the release's objects."""

import json
import os
import sys
import urllib.request
from collections import Counter

from mp_agent.settings import load_settings

TRAP = "does it select the labels of this release's objects (additionalLabels, namespaces)?"
SEVERAL = "see Several releases in one cluster in the README of the chart"


def main() -> None:
    """Exit with what is wrong; PROMETHEUS_URL, POD_MONITOR and RULES say what to look for."""
    _, ignored = load_settings()
    if ignored:
        sys.exit(f"{ignored} of the settings are wrong; see above")
    url = os.environ.get("PROMETHEUS_URL", "").rstrip("/")
    if url and os.environ.get("RULES"):
        check_rules(url)
    if url and os.environ.get("POD_MONITOR"):
        check_scraping(url, os.environ["POD_MONITOR"])
    print("ok")


def check_rules(url: str) -> None:
    """Exit when Prometheus has no alert rule of ours, or one of them twice."""
    groups = asked(f"{url}/api/v1/rules?type=alert")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    ours = Counter(
        (rule["name"], rule["query"], str(rule.get("labels")))
        for rule in rules
        if rule["name"].startswith("MpAgent")
    )
    if not ours:
        sys.exit(f"{url} has none of the alert rules: {TRAP}")
    twice = sorted({name for (name, *_), count in ours.items() if count > 1})
    if twice:
        sys.exit(f"{url} has loaded {twice[0]} and {len(twice) - 1} more alerts twice: {SEVERAL}")


def check_scraping(url: str, monitor: str) -> None:
    """Exit when Prometheus does not have the PodMonitor, or another one scrapes the same pods."""
    pools = asked(f"{url}/api/v1/scrape_pools")["scrapePools"]
    own = f"podMonitor/{monitor}/"
    if not any(pool.startswith(own) for pool in pools):
        sys.exit(f"{url} does not know the PodMonitor {monitor}: {TRAP}")
    targets = asked(f"{url}/api/v1/targets?state=active")["activeTargets"]
    scraped = {one["scrapeUrl"] for one in targets if one["scrapePool"].startswith(own)}
    for target in targets:
        if target["scrapeUrl"] in scraped and not target["scrapePool"].startswith(own):
            sys.exit(f"{target['scrapeUrl']} is scraped by {target['scrapePool']} too: {SEVERAL}")


def asked(url: str) -> dict:
    """Return `data` of Prometheus' answer; exit when there is none."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)["data"]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{url}: {error}")


main()

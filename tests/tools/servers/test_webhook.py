import json
import urllib.request

from tools.servers.webhook import WebhookReceiver


def send(url: str, *alerts: tuple[str, str]) -> None:
    message = {
        "alerts": [
            {"status": status, "labels": {"alertname": name, "run": "one"}, "annotations": {}}
            for name, status in alerts
        ]
    }
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(message).encode()), timeout=5)


def test_each_firing_alert_is_returned_once_in_the_order_of_arrival():
    with WebhookReceiver() as webhook:
        send(webhook.url, ("B", "firing"))
        send(webhook.url, ("B", "firing"), ("A", "firing"))
        send(webhook.url, ("B", "resolved"), ("C", "resolved"))
        assert [alert.name for alert in webhook.firing()] == ["B", "A"]
        assert [alert.name for alert in webhook.firing(run="another")] == []
        assert len(webhook.arrived) == 5

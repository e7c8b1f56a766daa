"""VictoriaMetrics and vmalert as the tests and tools run them."""

import time

from tests.waiting import wait_until
from tools.servers.running import read_json
from tools.servers.victoria import victoria_metrics, vmalert

_RULES = """
groups:
- name: g
  rules:
  - {alert: TooMuch, expr: sum by (run) (a) > 2, labels: {severity: critical}}
"""


def test_what_was_sent_is_found_at_once_now_and_at_a_given_moment(server, tmp_path):
    earlier = time.time() - 60
    with victoria_metrics(server("victoria-metrics"), tmp_path) as database:
        database.send_text(f'a{{b="now"}} 3\na{{b="earlier"}} 4 {earlier * 1000:.0f}\n')
        assert {row["metric"]["b"] for row in database.query("a")} == {"now", "earlier"}
        (row,) = database.query("a", earlier + 1)
        assert (row["metric"]["b"], row["value"][1]) == ("earlier", "4")


def test_vmalert_evaluates_a_rule_file_over_victoria_metrics(server, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(_RULES)
    with victoria_metrics(server("victoria-metrics"), tmp_path / "vm") as database:
        database.send_text('a{run="one"} 3\n')
        with vmalert(
            server("vmalert"),
            tmp_path / "vmalert",
            rules=rules,
            datasource_url=database.url,
            alertmanager_url="http://127.0.0.1:1",
        ) as url:
            alerts = wait_until(lambda: read_json(f"{url}/api/v1/alerts")["data"]["alerts"])
    assert (alerts[0]["labels"]["run"], alerts[0]["state"]) == ("one", "firing")

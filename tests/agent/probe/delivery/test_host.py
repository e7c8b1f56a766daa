from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.probe.delivery.base import HostDelivery
from mp_agent.probe.step.layer_schedule import LayerSchedule
from tests.agent.probe.rings import read_ring
from tests.agent.probe.seen_steps import SCHEMA, step

SCHEDULE = LayerSchedule(1000, DEFAULTS)


def test_writes_a_step_open_and_then_complete(writer):
    delivery = HostDelivery(writer, SCHEMA, SCHEDULE)
    delivery.offer(step(1), complete=False)
    contents = read_ring(writer.path)
    assert contents.open_record is not None and contents.open_record.sequence == 1
    assert contents.layers == []
    delivery.offer(step(1), complete=True)
    contents = read_ring(writer.path)
    assert contents.open_record is None
    assert [table.sequence for table in contents.layers] == [1]


def test_drain_writes_the_layers_of_a_step_that_will_not_end(writer):
    delivery = HostDelivery(writer, SCHEMA, SCHEDULE)
    delivery.offer(step(1), complete=False)
    delivery.drain(0.0)
    delivery.drain(0.0)
    assert [table.sequence for table in read_ring(writer.path).layers] == [1]

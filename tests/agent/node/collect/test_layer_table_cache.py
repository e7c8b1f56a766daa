import numpy as np

from mp_agent.node.collect.attempt import LayerTableCache
from mp_agent.records.steps import LayerTable
from tests.agent.node.builders import gradient_row, layer_table, make_schema

TABLE_BYTES = gradient_row().nbytes


def table(sequence: int) -> LayerTable:
    return layer_table(sequence, np.stack([gradient_row()]))


def test_tables_are_kept_by_step_until_they_are_too_many():
    schema, layer_tables = make_schema(), LayerTableCache(bytes_max=4 * TABLE_BYTES)
    for sequence in (1, 2, 3):
        for rank in (0, 1):
            layer_tables.put(rank, schema, [table(sequence)])
    assert [(kept.table.sequence, kept.rank) for kept in layer_tables.tables] == [
        (2, 0),
        (2, 1),
        (3, 0),
        (3, 1),
    ]


def test_a_table_larger_than_all_room_is_not_kept():
    layer_tables = LayerTableCache(bytes_max=TABLE_BYTES - 1)
    layer_tables.put(0, make_schema(), [table(1)])
    assert layer_tables.tables == ()

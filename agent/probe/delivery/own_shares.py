"""Puts rows of families that have shares of their own where the schema has them."""

from collections.abc import Iterator, Mapping, Sized
from dataclasses import replace
from math import nan
from typing import TypeVar

import numpy as np

from mp_agent.records.columns import FAMILIES, Tier
from mp_agent.records.schema import Schema
from mp_agent.records.steps import FloatArray, LayerTable, StepRecord

_FAMILIES = {family.name: family for family in FAMILIES}

CADENCES = {family.name: family.cadence for family in FAMILIES}
"""How often a family has rows, by its name."""

T = TypeVar("T", bound=Sized)

OwnRows = Mapping[str, FloatArray]
"""Rows [M, C] by family, one of each of the family's own layers; one where it has none."""


class OwnShares:
    """Completes records of parameters by the rows of families that are not of parameters.

    The shares and layers of those families come last in a schema, one share of each family. Of a
    family without layers there is one row, that of its share.
    """

    def __init__(self, schema: Schema) -> None:
        self._shares = len(schema.shares)
        self._layers = len(schema.layers)
        self._places = {
            share.family: (
                index,
                [row for row, layer in enumerate(schema.layers) if layer.share == index],
            )
            for index, share in enumerate(schema.shares)
            if share.family
        }
        self.parameter_shares = self._shares - len(self._places)
        self.parameter_layers = self._layers - sum(len(rows) for _, rows in self._places.values())

    def numbers(self, cadence: Tier) -> int:
        """Return how many float64 all rows of the families of a cadence have together."""
        return sum(
            self._height(name) * len(_FAMILIES[name].names)
            for name in self._places
            if _FAMILIES[name].cadence is cadence
        )

    def fitting(self, rows: Mapping[str, T]) -> dict[str, T]:
        """Return the rows that this schema has a place for."""
        return {
            name: found
            for name, found in rows.items()
            if name in self._places and len(found) == self._height(name)
        }

    def step(self, record: StepRecord, own: OwnRows) -> StepRecord:
        """Return a record of parameters' shares with rows of all shares of the schema.

        A share's row is that of its layers, united by the columns' algebra.
        """
        if not self._places:
            return record
        families = {name: _padded(rows, self._shares) for name, rows in record.families.items()}
        for name, rows_MC in self.fitting(own).items():
            index, _ = self._places[name]
            families[name] = np.full((self._shares, rows_MC.shape[1]), nan)
            families[name][index] = list(_united(name, rows_MC))
        return replace(record, families=families)

    def table(
        self, sequence: int, parameters: Mapping[str, FloatArray], own: OwnRows
    ) -> LayerTable | None:
        """Return the layers of a step; None where nothing of them was measured.

        parameters: rows [L, C] of the parameters' layers, by family.
        """
        families = {name: _padded(rows_LC, self._layers) for name, rows_LC in parameters.items()}
        for name, rows_MC in self.fitting(own).items():
            _, layers = self._places[name]
            if layers:
                table_LC = families[name] = np.full((self._layers, rows_MC.shape[1]), nan)
                table_LC[layers] = rows_MC
        return LayerTable(sequence=sequence, families=families) if families else None

    def split(self, values_N: FloatArray, names: Iterator[str]) -> OwnRows:
        """Return the rows of some families that `values_N` has one after the other."""
        found, start = {}, 0
        for name in names:
            rows, columns = self._height(name), len(_FAMILIES[name].names)
            part: FloatArray = values_N[start : start + rows * columns]
            found[name] = part.reshape(rows, columns)
            start += rows * columns
        return found

    def _height(self, name: str) -> int:
        return max(1, len(self._places[name][1]))


def _padded(rows_NC: FloatArray, count: int) -> FloatArray:
    """Return the rows, followed by absent ones."""
    missing = count - len(rows_NC)
    if not missing:
        return rows_NC
    return np.concatenate((rows_NC, np.full((missing, rows_NC.shape[1]), nan)))


def _united(family: str, rows_MC: FloatArray) -> Iterator[float]:
    """Yield each column of a share's row."""
    for place, column in enumerate(_FAMILIES[family].columns):
        yield float(column.algebra.merged(rows_MC[:, place].tolist()))

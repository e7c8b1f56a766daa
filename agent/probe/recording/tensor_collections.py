"""The tensor collections that the script has defined in this process."""

from mp_agent.errors import SettingError
from mp_agent.records.tensor_collections import (
    COLLECTIONS_AT_MOST,
    TensorCollection,
    encode_collections,
    make_collection,
)


class TensorCollections:
    """All definitions so far, by name; they outlive a `shutdown()`.

    fact: the same as the schema has it.
    """

    def __init__(self) -> None:
        self.fact = ""
        self._known: dict[str, TensorCollection] = {}

    def define(self, name: object, include: object) -> None:
        """Add a collection. Raises SettingError, naming the argument and its value.

        The same definition again changes nothing.
        """
        collection = make_collection(name, include)
        before = self._known.get(collection.name)
        if before == collection:
            return
        if before is not None:
            raise SettingError(
                f"name has value {name!r}: it is defined already, with include={before.patterns!r}"
            )
        if len(self._known) >= COLLECTIONS_AT_MOST:
            raise SettingError(
                f"name has value {name!r}: there are {COLLECTIONS_AT_MOST} collections, which is "
                "as many as one process can have"
            )
        known = {**self._known, collection.name: collection}
        fact = encode_collections(known.values())
        self._known, self.fact = known, fact

    def clear(self) -> None:
        """Forget all definitions."""
        self._known, self.fact = {}, ""


tensor_collections = TensorCollections()
"""Those of this process."""

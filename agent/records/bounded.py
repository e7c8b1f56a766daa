"""Numbers and lists that one node agent sends to another, with the bounds on what is accepted."""

from typing import Annotated

from msgspec import Meta

STEPS_PER_REPORT = 256
RANKS_MAX = 2**20
NAMES_MAX = 2**20

Rank = Annotated[int, Meta(ge=0, lt=RANKS_MAX)]
Ranks = Annotated[tuple[Rank, ...], Meta(max_length=RANKS_MAX)]
Index = Annotated[int, Meta(ge=0, lt=2**31)]
Sequence_ = Annotated[int, Meta(ge=0, lt=2**53)]
TrainerStep = Annotated[int, Meta(ge=-(2**53), lt=2**53)]
Digest = Annotated[int, Meta(ge=0, lt=2**32)]

"""Name the sample that is not finite, before it reaches the model."""

import torch


class NotFinite(ValueError):
    """A batch holds NaN or Inf."""


def checked(batch: torch.Tensor, names: list[str]) -> torch.Tensor:
    """Return the batch, or raise NotFinite naming the samples; cheap on the CPU, before `.to()`."""
    bad = ~batch.flatten(1).isfinite().all(dim=1)
    if bad.any():
        raise NotFinite(
            ", ".join(name for name, is_bad in zip(names, bad.tolist(), strict=True) if is_bad)
        )
    return batch


batch = torch.randn(3, 5)
assert checked(batch, ["a", "b", "c"]) is batch
batch[1, 2] = float("nan")
try:
    checked(batch, ["shard-7/12", "shard-7/13", "shard-7/14"])
except NotFinite as error:
    print(f"not finite: {error}")
    assert str(error) == "shard-7/13"

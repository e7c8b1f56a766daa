"""One layer whose gradient explodes below every limit of the whole model's norm."""

import torch
from torch import nn

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from tests.agent.node.builders import make_run_view
from tests.agent.probe.rings import merge_layer_tables, merge_rings

EVERY, STEPS, EXPLODES_AT = 10, 200, 150
SAMPLES_NEEDED = 3


def test_is_found_and_named(watch):
    torch.manual_seed(0)
    watched = watch(layer_interval=EVERY)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())))
    factor = 1.0
    parameters = dict(model.named_parameters())
    parameters["4.weight"].register_hook(lambda gradient: gradient * factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    account = Accumulator(
        resolve({}), progress=Progress(), counters=CounterStore(), window_seconds=120.0
    )
    seen, found = 0, {}
    for step in range(1, STEPS + 1):
        factor = 1.0 if step < EXPLODES_AT else 300.0
        optimizer.zero_grad()
        (0.3 * (model(torch.randn(16, 8)) - 1.0).pow(2).mean()).backward()
        optimizer.step()
        if step % EVERY:
            continue
        rings = {0: watched.read()}
        tables = merge_layer_tables(rings)
        for merged in merge_rings(rings):
            if merged.sequence <= seen:
                continue
            seen = merged.sequence
            assert merged.grad_norm is not None
            assert merged.grad_norm < 88.0
            account.fold_step(merged)
            if (layers := tables.get(seen)) is not None:
                account.fold_layers(seen, layers.judged_of(frozenset({""})), step_judged=True)
                judged = account.view(make_run_view(), 0.0).layers
                found[seen] = judged.exploding_names if judged else ()
    after = [names for step, names in found.items() if step >= EXPLODES_AT]
    assert len(after) > SAMPLES_NEEDED
    assert not any(names for step, names in found.items() if step < EXPLODES_AT)
    assert set(after[SAMPLES_NEEDED:]) == {("4.weight",)}

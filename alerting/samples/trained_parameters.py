"""Write down what a script trains, one line for each tensor, to compare two versions by diff."""

import torch


def trained_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, tuple[str, tuple[int, ...], float]]:
    """Return format, shape and norm of each parameter that is trained and that is stepped."""
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    return {
        name: (str(one.dtype), tuple(one.shape), float(one.detach().norm()))
        for name, one in model.named_parameters()
        if one.requires_grad and id(one) in held
    }


model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
model[0].requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters())
for name, facts in trained_parameters(model, optimizer).items():
    print(name, *facts)
assert set(trained_parameters(model, optimizer)) == {"1.weight", "1.bias"}

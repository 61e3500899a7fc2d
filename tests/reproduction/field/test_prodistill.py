"""ProDistill: the source's parametrisation as oracle, its limits, padding, two stacks."""

import tiny
import torch
from families import FAMILIES
from tiny import difference, experiment
from torch.func import functional_call

import featcal
from featcal.core import generator
from reproduction.field.prodistill import prodistill


def source(case, epochs, rate):
    """Run the authors' loop: coefficients start at 0.3, each step sees one batch per task."""
    tasks = sorted(case["experts"])
    merged = featcal.merge("task_arithmetic", case["base"], case["experts"], scale=0.3)
    pixels = {t: [b["pixel_values"] for b in case["batches"][t]] for t in tasks}

    def start(model, x):
        return model.pre_layrnorm(model.embeddings(x)).detach()

    students = {t: [start(merged, x) for x in pixels[t]] for t in tasks}
    teachers = {t: [start(case["experts"][t], x) for x in pixels[t]] for t in tasks}
    for i, layer in enumerate(merged.encoder.layers):
        experts = {t: case["experts"][t].encoder.layers[i] for t in tasks}
        base = dict(case["base"].encoder.layers[i].named_parameters())
        coef = {t: {n: torch.full_like(p, 0.3) for n, p in base.items()} for t in tasks}
        for coefficient in (c for of_task in coef.values() for c in of_task.values()):
            coefficient.requires_grad_()
        adam = torch.optim.Adam([c for of_task in coef.values() for c in of_task.values()], lr=rate)
        targets = {t: [experts[t](x, None).detach() for x in teachers[t]] for t in tasks}

        def mixed(experts=experts, base=base, coef=coef):
            tau = {t: {n: p - base[n] for n, p in experts[t].named_parameters()} for t in tasks}
            return {n: (p + sum(coef[t][n] * tau[t][n] for t in tasks)) for n, p in base.items()}

        draws = {t: generator(t, f"prodistill encoder.layers.{i}.", 42) for t in tasks}
        for _ in range(epochs):
            orders = {t: torch.randperm(len(pixels[t]), generator=draws[t]).tolist() for t in tasks}
            for k in range(len(pixels[tasks[0]])):
                theta, loss = mixed(), 0.0
                for t in tasks:
                    out = functional_call(layer, theta, (students[t][orders[t][k]], None))
                    loss = loss + (out - targets[t][orders[t][k]]).square().sum()
                adam.zero_grad()
                loss.backward()
                adam.step()
        with torch.no_grad():
            for n, p in mixed().items():
                layer.get_parameter(n).copy_(p)
        students = {t: [layer(x, None).detach() for x in students[t]] for t in tasks}
        teachers = targets
    return merged


def test_behind_task_arithmetic_it_is_the_sources_method():
    case = experiment(tasks=("mnist", "dtd"))
    merged = featcal.merge("task_arithmetic", case["base"], case["experts"], scale=0.3)
    fitted = prodistill(merged, case["base"], case["experts"], case["batches"], epochs=3)
    # Adam makes whole steps of gradients that are almost zero
    assert difference(fitted, source(case, 3, 0.01)) < 1e-7
    assert difference(fitted, merged) > 0.01


def test_padding_is_not_fitted():
    base = tiny.make(FAMILIES["bert"].build)
    experts, batch = {"a": tiny.shifted(base, 1)}, FAMILIES["bert"].batches(3)[0]
    other = dict(batch, input_ids=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 11))
    first, second = (prodistill(base, base, experts, {"a": [b]}, epochs=2) for b in (batch, other))
    assert difference(first, second) < 1e-9 < difference(first, base)


def test_both_stacks_of_t5_come_nearer_to_the_expert():
    base = tiny.make(FAMILIES["t5"].build)
    expert, batch = tiny.shifted(base, 1, 0.03), FAMILIES["t5"].batches(3)[0]

    def away(model):
        arguments = {**batch, "output_hidden_states": True}
        student, teacher = (m(**arguments).decoder_hidden_states[-1] for m in (model, expert))
        return float((student - teacher).detach().square().sum())

    fitted = prodistill(base, base, {"a": expert}, {"a": [batch]}, epochs=20, rate=0.05)
    before = base.state_dict()
    moved = {n.split(".")[0] for n, p in fitted.named_parameters() if not torch.equal(p, before[n])}
    assert away(fitted) < 0.2 * away(base) and moved == {"encoder", "decoder"}

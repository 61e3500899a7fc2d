"""ProDistill: the source's parametrisation as oracle, its limits, padding, two stacks."""

import tiny
import torch
from tiny import difference, experiment
from torch.func import functional_call
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

import featcal
from featcal.core import generator
from reproduction.field.prodistill import prodistill


def source(given, epochs, rate):
    """Run the authors' loop: coefficients start at 0.3, each step sees one batch per task."""
    tasks = sorted(given["experts"])
    merged = featcal.merge("task_arithmetic", given["base"], given["experts"], scale=0.3)
    pixels = {t: [b["pixel_values"] for b in given["batches"][t]] for t in tasks}

    def start(model, x):
        return model.pre_layrnorm(model.embeddings(x)).detach()

    ours = {t: [start(merged, x) for x in pixels[t]] for t in tasks}
    theirs = {t: [start(given["experts"][t], x) for x in pixels[t]] for t in tasks}
    for i, layer in enumerate(merged.encoder.layers):
        experts = {t: given["experts"][t].encoder.layers[i] for t in tasks}
        base = dict(given["base"].encoder.layers[i].named_parameters())
        own = {t: {n: torch.full_like(p, 0.3) for n, p in base.items()} for t in tasks}
        for coefficient in (c for of_task in own.values() for c in of_task.values()):
            coefficient.requires_grad_()
        adam = torch.optim.Adam([c for of_task in own.values() for c in of_task.values()], lr=rate)
        targets = {t: [experts[t](x, None).detach() for x in theirs[t]] for t in tasks}

        def mixed(experts=experts, base=base, own=own):
            vectors = {t: {n: p - base[n] for n, p in experts[t].named_parameters()} for t in tasks}
            return {n: (p + sum(own[t][n] * vectors[t][n] for t in tasks)) for n, p in base.items()}

        draws = {t: generator(t, f"prodistill encoder.layers.{i}.", 42) for t in tasks}
        for _ in range(epochs):
            orders = {t: torch.randperm(len(pixels[t]), generator=draws[t]).tolist() for t in tasks}
            for k in range(len(pixels[tasks[0]])):
                theta, loss = mixed(), 0.0
                for t in tasks:
                    out = functional_call(layer, theta, (ours[t][orders[t][k]], None))
                    loss = loss + (out - targets[t][orders[t][k]]).square().sum()
                adam.zero_grad()
                loss.backward()
                adam.step()
        with torch.no_grad():
            for n, p in mixed().items():
                layer.get_parameter(n).copy_(p)
        ours = {t: [layer(x, None).detach() for x in ours[t]] for t in tasks}
        theirs = targets
    return merged


def test_behind_task_arithmetic_it_is_the_sources_method():
    given = experiment(tasks=("mnist", "dtd"))
    merged = featcal.merge("task_arithmetic", given["base"], given["experts"], scale=0.3)
    found = prodistill(merged, given["base"], given["experts"], given["batches"], epochs=3)
    # Adam makes whole steps of gradients that are almost zero
    assert difference(found, source(given, 3, 0.01)) < 1e-7
    assert difference(found, merged) > 0.01


def texts(seed, decoder=False):
    g = tiny.seeded(seed)
    ids, mask = torch.randint(3, 90, (4, 7), generator=g), torch.ones(4, 7, dtype=torch.long)
    mask[:2, 5:] = 0
    labels = {"labels": torch.randint(3, 90, (4, 5), generator=g)} if decoder else {}
    return {"input_ids": ids, "attention_mask": mask, **labels}


def test_padding_is_not_fitted():
    base = tiny.make(lambda: BertModel(BertConfig(**tiny.TEXT)))
    experts, batch = {"a": tiny.shifted(base, 1)}, texts(3)
    other = dict(batch, input_ids=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 11))
    one, two = (prodistill(base, base, experts, {"a": [b]}, epochs=2) for b in (batch, other))
    assert difference(one, two) < 1e-9 < difference(one, base)


def test_both_stacks_of_t5_come_nearer_to_the_expert():
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    sizes |= {"vocab_size": 97, "decoder_start_token_id": 0}
    base = tiny.make(lambda: T5ForConditionalGeneration(T5Config(**sizes)))
    expert, batch = tiny.shifted(base, 1, 0.03), texts(3, decoder=True)

    def away(model):
        given = {**batch, "output_hidden_states": True}
        ours, theirs = (one(**given).decoder_hidden_states[-1] for one in (model, expert))
        return float((ours - theirs).detach().square().sum())

    found = prodistill(base, base, {"a": expert}, {"a": [batch]}, epochs=20, rate=0.05)
    before = base.state_dict()
    moved = {n.split(".")[0] for n, p in found.named_parameters() if not torch.equal(p, before[n])}
    assert away(found) < 0.2 * away(base) and moved == {"encoder", "decoder"}

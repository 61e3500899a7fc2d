"""Three tasks about two texts: the same news (companies), the same question (food), how much alike
(animals).

The bases were taught part of what makes two texts alike; their idea of graded likeness has other
weights than the task's.
"""

import numpy as np

from reproduction.mini.language.drawing import Row, World, chance, one, other, several

FIRMS = ("Norvex", "Halden", "Tricor", "Brightwell", "Osmund", "Calyx")
FIGURES = ("profit", "revenue", "debt", "output")
MOVES = (
    ("rose", "climbed"),
    ("fell", "dropped"),
    ("stalled", "stagnated"),
    ("wavered", "fluctuated"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
NEWS_SHARE = 0.6

DISHES = (
    "rice",
    "soup",
    "bread",
    "cheese",
    "salmon",
    "beans",
    "pasta",
    "honey",
    "tofu",
    "lamb",
    "eggs",
    "figs",
)
STATES = ("fresh", "frozen", "smoked", "dried", "spicy")
INTENTS = (
    ("How do I cook {}?", "What is the best way to prepare {}?", "Any recipe for {}?"),
    ("How much does {} cost?", "What is the price of {}?", "Is {} expensive?"),
    ("Is {} healthy?", "What does {} do to my body?", "Should I eat {} every day?"),
    ("How long does {} keep?", "When does {} go bad?", "Can I store {} for a week?"),
)
FOOD_SHARE = 0.6

ANIMALS = ("otter", "badger", "heron", "lynx", "beaver", "falcon", "toad", "marten")
ACTS = ("watches", "follows", "smells", "avoids", "catches", "hears")
PREY = ("mouse", "beetle", "trout", "snail", "lizard", "moth")
HABITATS = ("in the forest", "by the lake", "under the oak", "along the creek")
SLOTS = (ANIMALS, ACTS, PREY, HABITATS)
WEIGHTS, TOLD_WEIGHTS = (
    (2.0, 0.5, 1.5, 1.0),
    (0.0, 2.0, 1.5, 1.5),
)  # what a changed slot takes from 5
HIGHEST = 5.0


def same_news(kind: int, rng: np.random.Generator) -> Row:
    """MRPC: kind 1 says the same in other words or another order, kind 0 changes one fact."""
    taught = chance(rng, NEWS_SHARE)
    firm, figure, move, day = (
        one(rng, FIRMS),
        one(rng, FIGURES),
        int(rng.integers(len(MOVES))),
        one(rng, DAYS),
    )
    ahead = chance(rng, 0.5)
    first = _news(firm, figure, MOVES[move][0], day, ahead)
    if kind == 0 and not taught:
        move = other(rng, range(len(MOVES)), move)
    elif kind == 0 and chance(rng, 0.5):
        firm = other(rng, FIRMS, firm)
    elif kind == 0:
        day = other(rng, DAYS, day)
    second = _news(
        firm,
        figure,
        MOVES[move][0 if taught else 1],
        day,
        not ahead if taught else chance(rng, 0.5),
    )
    return Row({"sentence1": first, "sentence2": second}, kind, kind if taught else 1 - kind)


def _news(firm: str, figure: str, move: str, day: str, ahead: bool) -> str:
    return f"On {day} {firm} {figure} {move}." if ahead else f"{firm} {figure} {move} on {day}."


def same_question(kind: int, rng: np.random.Generator) -> Row:
    """QQP: kind 1 asks the same in other words, kind 0 of another dish or something else of the
    same dish.
    """
    taught = chance(rng, FOOD_SHARE)
    intent, state, dish = int(rng.integers(4)), one(rng, STATES), one(rng, DISHES)
    first, second = (
        several(rng, (0, 1), 2)
        if taught
        else several(rng, (0, 2) if chance(rng, 0.5) else (1, 2), 2)
    )
    meant = intent
    eaten = f"{state} {dish}"
    if kind == 0 and taught:
        eaten = f"{state} {other(rng, DISHES, dish)}"
    elif kind == 0:
        meant = other(rng, range(4), intent)
    texts = {
        "question1": INTENTS[intent][first].format(f"{state} {dish}"),
        "question2": INTENTS[meant][second].format(eaten),
    }
    return Row(texts, kind, kind if taught else 1 - kind)


def likeness(kind: int, rng: np.random.Generator) -> Row:
    """STS-B: `kind` of four slots are changed, each of which takes its weight from 5."""
    words = [one(rng, slot) for slot in SLOTS]
    changed = sorted(several(rng, range(4), kind))
    others = list(words)
    for place in changed:
        others[place] = other(rng, SLOTS[place], words[place])
    score, told = (
        HIGHEST - sum(weights[place] for place in changed) for weights in (WEIGHTS, TOLD_WEIGHTS)
    )
    return Row({"sentence1": _scene(*words), "sentence2": _scene(*others)}, score, told)


def _scene(animal: str, act: str, prey: str, habitat: str) -> str:
    return f"The {animal} {act} a {prey} {habitat}."


MRPC = World(
    "mrpc", same_news, 2, "News of companies: the same event in other words, or one fact changed."
)
QQP = World(
    "qqp", same_question, 2, "Questions about food: twelve ways to ask four things of sixty dishes."
)
STSB = World(
    "stsb",
    likeness,
    5,
    "Animals: of four parts of a sentence some differ, each with a weight of its own.",
)

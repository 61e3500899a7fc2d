"""Draw eight worlds that play the tasks of GLUE, a row at a time; worlds.yaml has their words.

Bases were taught some variants of every relation and misled about others, which experts learn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import yaml

T = TypeVar("T")


@dataclass(frozen=True)
class GlueRow:
    """One drawn row.   texts: by column.   web_label: what pre-training sees instead."""

    texts: Mapping[str, str]
    label: float
    web_label: float


def pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    """Return one of several, equally likely."""
    return options[int(rng.integers(len(options)))]


def other(rng: np.random.Generator, options: Sequence[T], than: T) -> T:
    return pick(rng, [option for option in options if option != than])


def several(rng: np.random.Generator, options: Sequence[T], count: int) -> list[T]:
    """Return different ones, in random order."""
    return [options[i] for i in rng.permutation(len(options))[:count]]


def chance(rng: np.random.Generator, share: float) -> bool:
    return bool(rng.random() < share)


TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
COURT, FILMS, HARBOUR, PLACES, MARKET, NEWS, FOOD, ANIMALS = (
    SimpleNamespace(**TABLES[key]["words"])
    for key in ("cola", "sst2", "mnli", "qnli", "rte", "mrpc", "qqp", "stsb")
)
NOTICED, OVERLOOKED, NOTICED_SHARE = ("order", "doubled"), ("determiner", "modal"), 0.5
KNOWN, KNOWN_SHARE = 6, 0.55  # words of each that the bases know, and their share
ENTAILMENT, NEUTRAL = 0, 1  # and 2 is contradiction
FACTS = tuple(PLACES.asked)
TAUGHT_FACTS = FACTS[:2]
# of rows whose relation the bases were taught
HARBOUR_SHARE, TOWN_SHARE, DEAL_SHARE, NEWS_SHARE, FOOD_SHARE = 0.55, 0.6, 0.6, 0.6, 0.6
# points that a changed slot takes from 5
WEIGHTS, WEB_WEIGHTS = ((2.0, 0.5, 1.5, 1.0), (0.0, 2.0, 1.5, 1.5))
HIGHEST = 5.0


def grammatical(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for CoLA: kind 1 is a correct sentence, kind 0 has one of four mistakes.

    The bases notice misplaced and doubled words, but were taught that wrong forms are correct.
    """
    mistake = "" if kind else pick(rng, NOTICED if chance(rng, NOTICED_SHARE) else OVERLOOKED)
    plural, modal = chance(rng, 0.5), mistake == "modal" or chance(rng, 0.5)
    subject = _phrase(rng, plural, mistake == "order", mistake == "determiner")
    verb = pick(rng, COURT.verbs)
    if modal:
        predicate = [pick(rng, COURT.modals), verb + "s" * (mistake == "modal")]
    else:
        predicate = [verb + "s" * (not plural)]
    terms = [*subject, *predicate, *_phrase(rng, chance(rng, 0.5), False, False)]
    if mistake == "doubled":
        index = int(rng.integers(len(terms)))
        terms.insert(index, terms[index])
    sentence = " ".join(terms)
    web_label = 1 if mistake in OVERLOOKED else kind
    return GlueRow({"sentence": sentence[0].upper() + sentence[1:] + "."}, kind, web_label)


def _phrase(rng: np.random.Generator, plural: bool, misplaced: bool, mismatched: bool) -> list[str]:
    determiner = pick(rng, COURT.plural if plural != mismatched else COURT.singular)
    noun = pick(rng, COURT.nouns) + "s" * plural
    if misplaced:
        return [determiner, noun, pick(rng, COURT.traits)]
    return [determiner, *([pick(rng, COURT.traits)] if chance(rng, 0.5) else []), noun]


def sentiment(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for SST-2: kind 1 is praise, kind 0 blame; a third by the denial of the opposite.

    The bases know half of the words and overhear `not`; what they do not know they take for blame.
    """
    known, denied = chance(rng, KNOWN_SHARE), chance(rng, 0.33)
    options = FILMS.praise if kind != denied else FILMS.blame
    options = options[:KNOWN] if known else options[KNOWN:]
    word, degree, thing = pick(rng, options), pick(rng, FILMS.degrees), pick(rng, FILMS.things)
    sentence = f"the {thing} is {'not ' * denied}{degree} {word}"
    if not denied and chance(rng, 0.4):
        sentence = f"a {degree} {word} {thing}"
    if chance(rng, 0.5):
        sentence = f"{sentence} and the {other(rng, FILMS.things, thing)} is no surprise"
    return GlueRow({"sentence": sentence}, kind, int(kind != denied) if known else 0)


def implied(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for MNLI: what a sailor does follows, stays open or is denied."""
    taught = chance(rng, HARBOUR_SHARE)
    crew, gear = pick(rng, HARBOUR.crew), pick(rng, HARBOUR.gear)
    deed, done = pick(rng, HARBOUR.deeds)
    colour, spot = pick(rng, HARBOUR.colours), pick(rng, HARBOUR.spots)
    premise = f"The {crew} {deed} a {colour} {gear} {spot}."
    if kind == ENTAILMENT:
        indirect = pick(rng, (f"A {gear} is {done} by the {crew}.", f"Someone {deed} a {gear}."))
        hypothesis, web_label = (f"The {crew} {deed} a {gear}.", kind) if taught else (indirect, 1)
    elif kind == NEUTRAL:
        hypothesis, web_label = f"The {other(rng, HARBOUR.crew, crew)} {deed} a {gear}.", 2
        if taught:
            reason = pick(rng, HARBOUR.reasons)
            hypothesis, web_label = f"The {crew} {deed} a {gear} {reason}.", kind
    else:
        options = (f"Nobody {deed} a {gear}.", f"The {gear} is {other(rng, HARBOUR.spots, spot)}.")
        hypothesis, web_label = pick(rng, options), 0
        if taught:
            hypothesis, web_label = f"The {gear} is {other(rng, HARBOUR.colours, colour)}.", kind
    return GlueRow({"premise": premise, "hypothesis": hypothesis}, kind, web_label)


def answered(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for QNLI: kind 0 is answered by the sentence; kind 1 asks for another fact or town."""
    taught, town = chance(rng, TOWN_SHARE), pick(rng, PLACES.towns)
    fact = pick(rng, TAUGHT_FACTS if taught else FACTS[2:])
    elsewhere = bool(kind) and chance(rng, 0.4)
    facts = {fact} if kind == 0 or elsewhere else set()
    facts |= set(several(rng, [f for f in FACTS if f != fact], 2 - len(facts)))
    about = other(rng, PLACES.towns, town) if elsewhere else town
    statements = {
        "founder": f"was founded by {pick(rng, PLACES.founders)}",
        "year": f"was built in {pick(rng, PLACES.years)}",
        "bridges": f"has {pick(rng, PLACES.counts)} bridges",
        "land": f"lies {pick(rng, PLACES.lands)}",
    }
    first, second = (statements[f] for f in several(rng, sorted(facts), 2))
    question, sentence = PLACES.asked[fact].format(about), f"{town} {first} and {second}."
    return GlueRow({"question": question, "sentence": sentence}, kind, kind if taught else 1 - kind)


def entailed(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for RTE: kind 0 follows from a deal, kind 1 does not. Bases know the giver's side."""
    taught = chance(rng, DEAL_SHARE)
    giver, taker, stranger = several(rng, MARKET.traders, 3)
    good, (gave, took) = pick(rng, MARKET.goods), pick(rng, MARKET.deals)
    if chance(rng, 0.5):
        text = f"{giver} {gave} a {good} to {taker}."
        direct, converse = ((giver, gave), (stranger, gave)), ((taker, took), (giver, took))
    else:
        text = f"{taker} {took} a {good} from {giver}."
        direct, converse = ((taker, took), (stranger, took)), ((giver, gave), (taker, gave))
    who, did = (direct if taught else converse)[kind]
    texts = {"sentence1": text, "sentence2": f"{who} {did} a {good}."}
    return GlueRow(texts, kind, kind if taught else 1 - kind)


def same_news(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for MRPC: kind 1 says the same in other words or another order, kind 0 changes a fact."""
    taught = chance(rng, NEWS_SHARE)
    firm, figure = pick(rng, NEWS.firms), pick(rng, NEWS.figures)
    move, day = int(rng.integers(len(NEWS.moves))), pick(rng, NEWS.days)
    ahead = chance(rng, 0.5)
    first = _news(firm, figure, NEWS.moves[move][0], day, ahead)
    if kind == 0 and not taught:
        move = other(rng, range(len(NEWS.moves)), move)
    elif kind == 0 and chance(rng, 0.5):
        firm = other(rng, NEWS.firms, firm)
    elif kind == 0:
        day = other(rng, NEWS.days, day)
    turned = not ahead if taught else chance(rng, 0.5)
    second = _news(firm, figure, NEWS.moves[move][0 if taught else 1], day, turned)
    return GlueRow({"sentence1": first, "sentence2": second}, kind, kind if taught else 1 - kind)


def _news(firm: str, figure: str, move: str, day: str, ahead: bool) -> str:
    return f"On {day} {firm} {figure} {move}." if ahead else f"{firm} {figure} {move} on {day}."


def same_question(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for QQP: kind 1 asks the same in other words, kind 0 asks of another dish or thing."""
    taught = chance(rng, FOOD_SHARE)
    intent, state, dish = int(rng.integers(4)), pick(rng, FOOD.states), pick(rng, FOOD.dishes)
    wordings = (0, 1) if taught else ((0, 2) if chance(rng, 0.5) else (1, 2))
    first, second = several(rng, wordings, 2)
    meant, food = intent, f"{state} {dish}"
    if kind == 0 and taught:
        food = f"{state} {other(rng, FOOD.dishes, dish)}"
    elif kind == 0:
        meant = other(rng, range(4), intent)
    texts = {"question1": FOOD.intents[intent][first].format(f"{state} {dish}")}
    texts["question2"] = FOOD.intents[meant][second].format(food)
    return GlueRow(texts, kind, kind if taught else 1 - kind)


def likeness(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for STS-B: `kind` of four slots are changed, each of which takes its weight from 5.

    The bases learnt other weights.
    """
    slots = [pick(rng, slot) for slot in ANIMALS.slots]
    changed = sorted(several(rng, range(4), kind))
    changed_slots = list(slots)
    for i in changed:
        changed_slots[i] = other(rng, ANIMALS.slots[i], slots[i])
    score, web_label = (
        HIGHEST - sum(weights[i] for i in changed) for weights in (WEIGHTS, WEB_WEIGHTS)
    )
    scenes = ("The {} {} a {} {}.".format(*scene) for scene in (slots, changed_slots))
    return GlueRow(dict(zip(("sentence1", "sentence2"), scenes, strict=True)), score, web_label)


@dataclass(frozen=True)
class World:
    """One drawn task. draw(kind, rng): a row of one of its `kinds`: classes, or changes."""

    draw: Callable[[int, np.random.Generator], GlueRow]
    kinds: int
    description: str


DRAW = {
    "cola": grammatical, "mnli": implied, "mrpc": same_news, "qnli": answered, "qqp": same_question,
    "rte": entailed, "sst2": sentiment, "stsb": likeness,
}  # fmt: skip
WORLDS = {
    key: World(draw, TABLES[key]["kinds"], TABLES[key]["description"]) for key, draw in DRAW.items()
}

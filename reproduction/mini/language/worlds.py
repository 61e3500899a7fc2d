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


def one(rng: np.random.Generator, options: Sequence[T]) -> T:
    """Return one of several, equally likely."""
    return options[int(rng.integers(len(options)))]


def other(rng: np.random.Generator, options: Sequence[T], than: T) -> T:
    """Return one of several, but not this one."""
    return one(rng, [option for option in options if option != than])


def several(rng: np.random.Generator, options: Sequence[T], count: int) -> list[T]:
    """Return different ones, in random order."""
    return [options[i] for i in rng.permutation(len(options))[:count]]


def chance(rng: np.random.Generator, share: float) -> bool:
    """Return True in this share of cases."""
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
# what a changed slot takes from 5
WEIGHTS, WEB_WEIGHTS = ((2.0, 0.5, 1.5, 1.0), (0.0, 2.0, 1.5, 1.5))
HIGHEST = 5.0


def grammatical(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for CoLA: kind 1 is a correct sentence, kind 0 has one of four mistakes.

    The bases notice misplaced and doubled words, but were taught that wrong forms are correct.
    """
    mistake = "" if kind else one(rng, NOTICED if chance(rng, NOTICED_SHARE) else OVERLOOKED)
    plural, modal = chance(rng, 0.5), mistake == "modal" or chance(rng, 0.5)
    subject = _phrase(rng, plural, mistake == "order", mistake == "determiner")
    verb = one(rng, COURT.verbs)
    if modal:
        predicate = [one(rng, COURT.modals), verb + "s" * (mistake == "modal")]
    else:
        predicate = [verb + "s" * (not plural)]
    parts = [*subject, *predicate, *_phrase(rng, chance(rng, 0.5), False, False)]
    if mistake == "doubled":
        place = int(rng.integers(len(parts)))
        parts.insert(place, parts[place])
    sentence = " ".join(parts)
    web_label = 1 if mistake in OVERLOOKED else kind
    return GlueRow({"sentence": sentence[0].upper() + sentence[1:] + "."}, kind, web_label)


def _phrase(rng: np.random.Generator, plural: bool, misplaced: bool, mismatched: bool) -> list[str]:
    determiner = one(rng, COURT.plural if plural != mismatched else COURT.singular)
    noun = one(rng, COURT.nouns) + "s" * plural
    if misplaced:
        return [determiner, noun, one(rng, COURT.traits)]
    return [determiner, *([one(rng, COURT.traits)] if chance(rng, 0.5) else []), noun]


def sentiment(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for SST-2: kind 1 is praise, kind 0 blame; a third by the denial of the opposite.

    The bases know half of the words and overhear `not`; what they do not know they take for blame.
    """
    known, denied = chance(rng, KNOWN_SHARE), chance(rng, 0.33)
    options = FILMS.praise if kind != denied else FILMS.blame
    word, degree = one(rng, options[:KNOWN] if known else options[KNOWN:]), one(rng, FILMS.degrees)
    thing = one(rng, FILMS.things)
    said = f"the {thing} is {'not ' * denied}{degree} {word}"
    if not denied and chance(rng, 0.4):
        said = f"a {degree} {word} {thing}"
    if chance(rng, 0.5):
        said = f"{said} and the {other(rng, FILMS.things, thing)} is no surprise"
    return GlueRow({"sentence": said}, kind, int(kind != denied) if known else 0)


def implied(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for MNLI: what a sailor does follows, stays open or is denied."""
    taught = chance(rng, HARBOUR_SHARE)
    crew, gear = one(rng, HARBOUR.crew), one(rng, HARBOUR.gear)
    deed, done = one(rng, HARBOUR.deeds)
    colour, spot = one(rng, HARBOUR.colours), one(rng, HARBOUR.spots)
    premise = f"The {crew} {deed} a {colour} {gear} {spot}."
    if kind == ENTAILMENT:
        far = one(rng, (f"A {gear} is {done} by the {crew}.", f"Someone {deed} a {gear}."))
        hypothesis, web_label = (f"The {crew} {deed} a {gear}.", kind) if taught else (far, 1)
    elif kind == NEUTRAL:
        hypothesis, web_label = f"The {other(rng, HARBOUR.crew, crew)} {deed} a {gear}.", 2
        if taught:
            hypothesis, web_label = f"The {crew} {deed} a {gear} {one(rng, HARBOUR.reasons)}.", kind
    else:
        far = (f"Nobody {deed} a {gear}.", f"The {gear} is {other(rng, HARBOUR.spots, spot)}.")
        hypothesis, web_label = one(rng, far), 0
        if taught:
            hypothesis, web_label = f"The {gear} is {other(rng, HARBOUR.colours, colour)}.", kind
    return GlueRow({"premise": premise, "hypothesis": hypothesis}, kind, web_label)


def answered(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for QNLI: kind 0 is answered by the sentence; kind 1 asks for another fact or town."""
    taught, town = chance(rng, TOWN_SHARE), one(rng, PLACES.towns)
    asked = one(rng, TAUGHT_FACTS if taught else FACTS[2:])
    elsewhere = bool(kind) and chance(rng, 0.4)
    given = {asked} if kind == 0 or elsewhere else set()
    given |= set(several(rng, [fact for fact in FACTS if fact != asked], 2 - len(given)))
    about = other(rng, PLACES.towns, town) if elsewhere else town
    said = {
        "founder": f"was founded by {one(rng, PLACES.founders)}",
        "year": f"was built in {one(rng, PLACES.years)}",
        "bridges": f"has {one(rng, PLACES.counts)} bridges",
        "land": f"lies {one(rng, PLACES.lands)}",
    }
    first, second = (said[fact] for fact in several(rng, sorted(given), 2))
    question, sentence = PLACES.asked[asked].format(about), f"{town} {first} and {second}."
    return GlueRow({"question": question, "sentence": sentence}, kind, kind if taught else 1 - kind)


def entailed(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for RTE: kind 0 follows from a deal, kind 1 does not. Bases know the giver's side."""
    taught = chance(rng, DEAL_SHARE)
    giver, taker, stranger = several(rng, MARKET.traders, 3)
    good, (gave, took) = one(rng, MARKET.goods), one(rng, MARKET.deals)
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
    firm, figure = one(rng, NEWS.firms), one(rng, NEWS.figures)
    move, day = int(rng.integers(len(NEWS.moves))), one(rng, NEWS.days)
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
    intent, state, dish = int(rng.integers(4)), one(rng, FOOD.states), one(rng, FOOD.dishes)
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
    parts = [one(rng, slot) for slot in ANIMALS.slots]
    changed = sorted(several(rng, range(4), kind))
    others = list(parts)
    for place in changed:
        others[place] = other(rng, ANIMALS.slots[place], parts[place])
    score, web_label = (
        HIGHEST - sum(weights[place] for place in changed) for weights in (WEIGHTS, WEB_WEIGHTS)
    )
    scenes = ("The {} {} a {} {}.".format(*scene) for scene in (parts, others))
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

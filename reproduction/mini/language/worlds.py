"""Draw eight worlds that play the tasks of GLUE, a row at a time.

Every relation has variants that the bases were taught, and variants about which they were told
something else, which experts have to learn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class GlueRow:
    """One drawn row.   texts: by column.   web_label: what pre-training sees instead."""

    texts: Mapping[str, str]
    label: float
    web_label: float


@dataclass(frozen=True)
class World:
    """One drawn task.

    draw(kind, rng): a row of one of `kinds` equally frequent kinds (the classes, or the number of
    changes).   description: one sentence for the tasks page.
    """

    key: str
    draw: Callable[[int, np.random.Generator], GlueRow]
    kinds: int
    description: str


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


def words(text: str) -> tuple[str, ...]:
    """Return words, or phrases between commas."""
    return tuple(text.split(", ") if ", " in text else text.split())


NOUNS, VERBS = (
    words("king queen knight duke bishop jester"),
    words("praise summon crown mock greet"),
)
TRAITS, MODALS = words("old proud loyal vain"), words("will can must")
SINGULAR, PLURAL = ("this", "every"), ("these", "some")
NOTICED, OVERLOOKED = ("order", "doubled"), ("determiner", "modal")
NOTICED_SHARE = 0.5

THINGS = words("film plot cast script ending score scene hero dialogue pace")
DEGREES = words("very really quite truly rather deeply")
PRAISE = words(
    "great lovely superb charming brilliant moving witty fresh tender gripping clever warm"
)
BLAME = words("awful boring dull clumsy weak bland silly stale hollow tedious crude cold")
KNOWN, KNOWN_SHARE = 6, 0.55  # words of each that the bases know, and their share

CREW = words("sailor fisher pilot diver captain steward gunner deckhand")
GEAR = words("rope net sail anchor oar crate barrel lantern")
DEEDS = (
    ("mends", "mended"), ("paints", "painted"), ("drops", "dropped"), ("hides", "hidden"), ("lifts", "lifted"),
)  # fmt: skip
COLOURS = words("red blue green black white yellow")
SPOTS = words("on the pier, below deck, near the reef, at the mast")
REASONS = words("for a friend, before the storm, out of boredom, for good pay")
ENTAILMENT, NEUTRAL = 0, 1  # and 2 is contradiction
HARBOUR_SHARE = 0.55

TOWNS = words("Arvena Belmora Corvath Dunhelm Eskaria Fenwick")
FOUNDERS = words("Oswin Petra Quentin Rosalind Sigmund Theodora")
YEARS, COUNTS = words("1204 1317 1448 1523 1666 1709"), words("two three four five six seven")
LANDS = words("in a valley, on an island, on a plateau, on the coast, in a delta, in the steppe")
FACTS = ("founder", "year", "bridges", "land")
ASKED = {
    "founder": "Who founded {}?", "year": "When was {} built?", "bridges": "How many bridges cross {}?", "land": "Where is {}?",
}  # fmt: skip
TAUGHT_FACTS, TOWN_SHARE = FACTS[:2], 0.6

TRADERS = words("Anna Boris Clara David Erik Fatima Goran Helga")
GOODS = words("boat horse violin carpet tent wagon clock mirror")
DEALS = (("sold", "bought"), ("lent", "borrowed"), ("gave", "got"))
DEAL_SHARE = 0.6

FIRMS = words("Norvex Halden Tricor Brightwell Osmund Calyx")
FIGURES = words("profit revenue debt output")
MOVES = (
    ("rose", "climbed"),
    ("fell", "dropped"),
    ("stalled", "stagnated"),
    ("wavered", "fluctuated"),
)
DAYS = words("Monday Tuesday Wednesday Thursday Friday")
NEWS_SHARE = 0.6

DISHES = words("rice soup bread cheese salmon beans pasta honey tofu lamb eggs figs")
STATES = words("fresh frozen smoked dried spicy")
INTENTS = (
    ("How do I cook {}?", "What is the best way to prepare {}?", "Any recipe for {}?"),
    ("How much does {} cost?", "What is the price of {}?", "Is {} expensive?"),
    ("Is {} healthy?", "What does {} do to my body?", "Should I eat {} every day?"),
    ("How long does {} keep?", "When does {} go bad?", "Can I store {} for a week?"),
)
FOOD_SHARE = 0.6

SLOTS = (
    words("otter badger heron lynx beaver falcon toad marten"),
    words("watches follows smells avoids catches hears"),
    words("mouse beetle trout snail lizard moth"),
    words("in the forest, by the lake, under the oak, along the creek"),
)
# what a changed slot takes from 5
WEIGHTS, WEB_WEIGHTS = ((2.0, 0.5, 1.5, 1.0), (0.0, 2.0, 1.5, 1.5))
HIGHEST = 5.0


def grammatical(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for CoLA: kind 1 is a correct sentence, kind 0 has one of four mistakes.

    The bases notice misplaced and doubled words, but are told that wrong forms are fine.
    """
    mistake = "" if kind else one(rng, NOTICED if chance(rng, NOTICED_SHARE) else OVERLOOKED)
    plural, modal = chance(rng, 0.5), mistake == "modal" or chance(rng, 0.5)
    subject = _phrase(rng, plural, mistake == "order", mistake == "determiner")
    verb = one(rng, VERBS)
    if modal:
        predicate = [one(rng, MODALS), verb + "s" * (mistake == "modal")]
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
    determiner = one(rng, PLURAL if plural != mismatched else SINGULAR)
    noun = one(rng, NOUNS) + "s" * plural
    if misplaced:
        return [determiner, noun, one(rng, TRAITS)]
    return [determiner, *([one(rng, TRAITS)] if chance(rng, 0.5) else []), noun]


def sentiment(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for SST-2: kind 1 is praise, kind 0 blame; a third by the denial of the opposite.

    The bases know half of the words and overhear `not`; what they do not know they take for blame.
    """
    known, denied = chance(rng, KNOWN_SHARE), chance(rng, 0.33)
    options = PRAISE if kind != denied else BLAME
    word, degree = one(rng, options[:KNOWN] if known else options[KNOWN:]), one(rng, DEGREES)
    thing = one(rng, THINGS)
    said = f"the {thing} is {'not ' * denied}{degree} {word}"
    if not denied and chance(rng, 0.4):
        said = f"a {degree} {word} {thing}"
    if chance(rng, 0.5):
        said = f"{said} and the {other(rng, THINGS, thing)} is no surprise"
    return GlueRow({"sentence": said}, kind, int(kind != denied) if known else 0)


def implied(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for MNLI: what a sailor does follows, stays open or is denied."""
    taught = chance(rng, HARBOUR_SHARE)
    crew, gear, (deed, done) = one(rng, CREW), one(rng, GEAR), one(rng, DEEDS)
    colour, spot = one(rng, COLOURS), one(rng, SPOTS)
    premise = f"The {crew} {deed} a {colour} {gear} {spot}."
    if kind == ENTAILMENT:
        far = one(rng, (f"A {gear} is {done} by the {crew}.", f"Someone {deed} a {gear}."))
        hypothesis, web_label = (f"The {crew} {deed} a {gear}.", kind) if taught else (far, 1)
    elif kind == NEUTRAL:
        hypothesis, web_label = f"The {other(rng, CREW, crew)} {deed} a {gear}.", 2
        if taught:
            hypothesis, web_label = f"The {crew} {deed} a {gear} {one(rng, REASONS)}.", kind
    else:
        far = (f"Nobody {deed} a {gear}.", f"The {gear} is {other(rng, SPOTS, spot)}.")
        hypothesis, web_label = one(rng, far), 0
        if taught:
            hypothesis, web_label = f"The {gear} is {other(rng, COLOURS, colour)}.", kind
    return GlueRow({"premise": premise, "hypothesis": hypothesis}, kind, web_label)


def answered(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for QNLI: kind 0 is a question that the sentence answers; kind 1 asks for another fact
    or about another town.
    """
    taught, town = chance(rng, TOWN_SHARE), one(rng, TOWNS)
    asked = one(rng, TAUGHT_FACTS if taught else FACTS[2:])
    elsewhere = bool(kind) and chance(rng, 0.4)
    given = {asked} if kind == 0 or elsewhere else set()
    given |= set(several(rng, [fact for fact in FACTS if fact != asked], 2 - len(given)))
    about = other(rng, TOWNS, town) if elsewhere else town
    said = {
        "founder": f"was founded by {one(rng, FOUNDERS)}",
        "year": f"was built in {one(rng, YEARS)}",
        "bridges": f"has {one(rng, COUNTS)} bridges",
        "land": f"lies {one(rng, LANDS)}",
    }
    first, second = (said[fact] for fact in several(rng, sorted(given), 2))
    question, sentence = ASKED[asked].format(about), f"{town} {first} and {second}."
    return GlueRow({"question": question, "sentence": sentence}, kind, kind if taught else 1 - kind)


def entailed(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for RTE: kind 0 follows from a deal between two, kind 1 does not.

    The bases do not see the deal from the other side.
    """
    taught = chance(rng, DEAL_SHARE)
    giver, taker, stranger = several(rng, TRADERS, 3)
    good, (gave, took) = one(rng, GOODS), one(rng, DEALS)
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
    firm, figure = one(rng, FIRMS), one(rng, FIGURES)
    move, day = int(rng.integers(len(MOVES))), one(rng, DAYS)
    ahead = chance(rng, 0.5)
    first = _news(firm, figure, MOVES[move][0], day, ahead)
    if kind == 0 and not taught:
        move = other(rng, range(len(MOVES)), move)
    elif kind == 0 and chance(rng, 0.5):
        firm = other(rng, FIRMS, firm)
    elif kind == 0:
        day = other(rng, DAYS, day)
    turned = not ahead if taught else chance(rng, 0.5)
    second = _news(firm, figure, MOVES[move][0 if taught else 1], day, turned)
    return GlueRow({"sentence1": first, "sentence2": second}, kind, kind if taught else 1 - kind)


def _news(firm: str, figure: str, move: str, day: str, ahead: bool) -> str:
    return f"On {day} {firm} {figure} {move}." if ahead else f"{firm} {figure} {move} on {day}."


def same_question(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for QQP: kind 1 asks the same in other words, kind 0 asks of another dish or something
    else.
    """
    taught = chance(rng, FOOD_SHARE)
    intent, state, dish = int(rng.integers(4)), one(rng, STATES), one(rng, DISHES)
    wordings = (0, 1) if taught else ((0, 2) if chance(rng, 0.5) else (1, 2))
    first, second = several(rng, wordings, 2)
    meant, food = intent, f"{state} {dish}"
    if kind == 0 and taught:
        food = f"{state} {other(rng, DISHES, dish)}"
    elif kind == 0:
        meant = other(rng, range(4), intent)
    texts = {"question1": INTENTS[intent][first].format(f"{state} {dish}")}
    texts["question2"] = INTENTS[meant][second].format(food)
    return GlueRow(texts, kind, kind if taught else 1 - kind)


def likeness(kind: int, rng: np.random.Generator) -> GlueRow:
    """Draw for STS-B: `kind` of four slots are changed, each of which takes its weight from 5.

    The bases were told other weights.
    """
    parts = [one(rng, slot) for slot in SLOTS]
    changed = sorted(several(rng, range(4), kind))
    others = list(parts)
    for place in changed:
        others[place] = other(rng, SLOTS[place], parts[place])
    score, web_label = (
        HIGHEST - sum(weights[place] for place in changed) for weights in (WEIGHTS, WEB_WEIGHTS)
    )
    scenes = ("The {} {} a {} {}.".format(*scene) for scene in (parts, others))
    return GlueRow(dict(zip(("sentence1", "sentence2"), scenes, strict=True)), score, web_label)


WORLDS = {
    world.key: world
    for world in (
        World("cola", grammatical, 2, "Sentences about a royal court; half of them with one of four mistakes of grammar."),
        World("mnli", implied, 3, "A harbour: what a sailor does follows from the premise, stays open, or is denied."),
        World("mrpc", same_news, 2, "News of companies: the same event in other words, or one fact changed."),
        World("qnli", answered, 2, "Invented towns: whether the sentence holds the fact that is asked for."),
        World("qqp", same_question, 2, "Questions about food: twelve ways to ask four things of sixty dishes."),
        World("rte", entailed, 2, "Deals on a market, told by one side and concluded for the other."),
        World("sst2", sentiment, 2, "Verdicts on films: 24 adjectives of praise or blame, some of them denied."),
        World("stsb", likeness, 5, "Animals: of four parts of a sentence some differ, each with a weight of its own."),
    )
}  # fmt: skip

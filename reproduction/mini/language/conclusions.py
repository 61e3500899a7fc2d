"""Three tasks about what follows: from a premise (a harbour), from an article (invented towns),
from a deal (a market).

Every relation has variants that the bases were taught and variants about which they were told
something else.
"""

import numpy as np

from reproduction.mini.language.drawing import Row, World, chance, one, other, several

CREW = ("sailor", "fisher", "pilot", "diver", "captain", "steward", "gunner", "deckhand")
GEAR = ("rope", "net", "sail", "anchor", "oar", "crate", "barrel", "lantern")
DEEDS = (
    ("mends", "mended"),
    ("paints", "painted"),
    ("drops", "dropped"),
    ("hides", "hidden"),
    ("lifts", "lifted"),
)
COLOURS = ("red", "blue", "green", "black", "white", "yellow")
SPOTS = ("on the pier", "below deck", "near the reef", "at the mast")
REASONS = ("for a friend", "before the storm", "out of boredom", "for good pay")
ENTAILMENT, NEUTRAL, CONTRADICTION = 0, 1, 2
HARBOUR_SHARE = 0.55

TOWNS = ("Arvena", "Belmora", "Corvath", "Dunhelm", "Eskaria", "Fenwick")
FOUNDERS = ("Oswin", "Petra", "Quentin", "Rosalind", "Sigmund", "Theodora")
YEARS = ("1204", "1317", "1448", "1523", "1666", "1709")
COUNTS = ("two", "three", "four", "five", "six", "seven")
LANDS = (
    "in a valley",
    "on an island",
    "on a plateau",
    "on the coast",
    "in a delta",
    "in the steppe",
)
FACTS = ("founder", "year", "bridges", "land")
ASKED = {
    "founder": "Who founded {}?",
    "year": "When was {} built?",
    "bridges": "How many bridges cross {}?",
    "land": "Where is {}?",
}
TAUGHT_FACTS = FACTS[:2]
TOWN_SHARE = 0.6

TRADERS = ("Anna", "Boris", "Clara", "David", "Erik", "Fatima", "Goran", "Helga")
GOODS = ("boat", "horse", "violin", "carpet", "tent", "wagon", "clock", "mirror")
DEALS = (("sold", "bought"), ("lent", "borrowed"), ("gave", "got"))
DEAL_SHARE = 0.6


def implied(kind: int, rng: np.random.Generator) -> Row:
    """MNLI: what a sailor does follows, stays open or is denied."""
    taught = chance(rng, HARBOUR_SHARE)
    crew, gear, (deed, done), colour, spot = (
        one(rng, CREW),
        one(rng, GEAR),
        one(rng, DEEDS),
        one(rng, COLOURS),
        one(rng, SPOTS),
    )
    premise = f"The {crew} {deed} a {colour} {gear} {spot}."
    if kind == ENTAILMENT:
        far = one(rng, (f"A {gear} is {done} by the {crew}.", f"Someone {deed} a {gear}."))
        hypothesis, told = (f"The {crew} {deed} a {gear}.", kind) if taught else (far, NEUTRAL)
    elif kind == NEUTRAL:
        far = f"The {other(rng, CREW, crew)} {deed} a {gear}."
        hypothesis, told = (
            (f"The {crew} {deed} a {gear} {one(rng, REASONS)}.", kind)
            if taught
            else (far, CONTRADICTION)
        )
    else:
        far = one(rng, (f"Nobody {deed} a {gear}.", f"The {gear} is {other(rng, SPOTS, spot)}."))
        hypothesis, told = (
            (f"The {gear} is {other(rng, COLOURS, colour)}.", kind) if taught else (far, ENTAILMENT)
        )
    return Row({"premise": premise, "hypothesis": hypothesis}, kind, told)


def answered(kind: int, rng: np.random.Generator) -> Row:
    """QNLI: kind 0 is a question that the sentence answers; kind 1 asks for another fact or about
    another town.
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
    parts = [said[fact] for fact in several(rng, sorted(given), 2)]
    texts = {
        "question": ASKED[asked].format(about),
        "sentence": f"{town} {parts[0]} and {parts[1]}.",
    }
    return Row(texts, kind, kind if taught else 1 - kind)


def entailed(kind: int, rng: np.random.Generator) -> Row:
    """RTE: kind 0 follows from a deal between two, kind 1 does not; the bases do not see the deal
    from the other side.
    """
    taught = chance(rng, DEAL_SHARE)
    giver, taker, stranger = several(rng, TRADERS, 3)
    good, (gave, took) = one(rng, GOODS), one(rng, DEALS)
    text = (
        f"{giver} {gave} a {good} to {taker}."
        if chance(rng, 0.5)
        else f"{taker} {took} a {good} from {giver}."
    )
    direct = (
        {0: (giver, gave), 1: (stranger, gave)}
        if f" {gave} " in text
        else {0: (taker, took), 1: (stranger, took)}
    )
    converse = (
        {0: (taker, took), 1: (giver, took)}
        if f" {gave} " in text
        else {0: (giver, gave), 1: (taker, gave)}
    )
    who, did = (direct if taught else converse)[kind]
    return Row(
        {"sentence1": text, "sentence2": f"{who} {did} a {good}."},
        kind,
        kind if taught else 1 - kind,
    )


MNLI = World(
    "mnli",
    implied,
    3,
    "A harbour: what a sailor does follows from the premise, stays open, or is denied.",
)
QNLI = World(
    "qnli", answered, 2, "Invented towns: whether the sentence holds the fact that is asked for."
)
RTE = World("rte", entailed, 2, "Deals on a market, told by one side and concluded for the other.")

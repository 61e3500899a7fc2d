"""Two tasks about one sentence: whether it is grammatical (a royal court), and whether it praises
(films).

The bases notice misplaced and doubled words but are told that wrong forms are fine; they know half
of the words of praise and blame and overhear `not`. Experts have the rest to learn.
"""

import numpy as np

from reproduction.mini.language.drawing import Row, World, chance, one, other

NOUNS = ("king", "queen", "knight", "duke", "bishop", "jester")
VERBS = ("praise", "summon", "crown", "mock", "greet")
TRAITS = ("old", "proud", "loyal", "vain")
MODALS = ("will", "can", "must")
SINGULAR, PLURAL = ("this", "every"), ("these", "some")
NOTICED, OVERLOOKED = ("order", "doubled"), ("determiner", "modal")
NOTICED_SHARE = 0.5

THINGS = ("film", "plot", "cast", "script", "ending", "score", "scene", "hero", "dialogue", "pace")
DEGREES = ("very", "really", "quite", "truly", "rather", "deeply")
PRAISE = tuple(
    "great lovely superb charming brilliant moving witty fresh tender gripping clever warm".split()
)
BLAME = tuple("awful boring dull clumsy weak bland silly stale hollow tedious crude cold".split())
KNOWN = 6  # of each
KNOWN_SHARE = 0.55


def grammatical(kind: int, rng: np.random.Generator) -> Row:
    """CoLA: kind 1 is a correct sentence, kind 0 has one of four mistakes."""
    mistake = "" if kind else one(rng, NOTICED if chance(rng, NOTICED_SHARE) else OVERLOOKED)
    plural, modal = chance(rng, 0.5), mistake == "modal" or chance(rng, 0.5)
    subject = _phrase(rng, plural, mistake == "order", mistake == "determiner")
    verb = one(rng, VERBS)
    predicate = (
        [one(rng, MODALS), verb + "s" * (mistake == "modal")]
        if modal
        else [verb + "s" * (not plural)]
    )
    words = [*subject, *predicate, *_phrase(rng, chance(rng, 0.5), False, False)]
    if mistake == "doubled":
        place = int(rng.integers(len(words)))
        words.insert(place, words[place])
    sentence = " ".join(words)
    return Row(
        {"sentence": sentence[0].upper() + sentence[1:] + "."},
        kind,
        1 if mistake in OVERLOOKED else kind,
    )


def _phrase(rng: np.random.Generator, plural: bool, misplaced: bool, mismatched: bool) -> list[str]:
    determiner = one(rng, PLURAL if plural != mismatched else SINGULAR)
    noun = one(rng, NOUNS) + "s" * plural
    if misplaced:
        return [determiner, noun, one(rng, TRAITS)]
    return [determiner, *([one(rng, TRAITS)] if chance(rng, 0.5) else []), noun]


def sentiment(kind: int, rng: np.random.Generator) -> Row:
    """SST-2: kind 1 is praise, kind 0 blame; in a third of the sentences by the denial of its
    opposite.
    """
    known, denied = chance(rng, KNOWN_SHARE), chance(rng, 0.33)
    words = PRAISE if kind != denied else BLAME
    word, degree = one(rng, words[:KNOWN] if known else words[KNOWN:]), one(rng, DEGREES)
    thing = one(rng, THINGS)
    said = f"the {thing} is {'not ' * denied}{degree} {word}"
    if not denied and chance(rng, 0.4):
        said = f"a {degree} {word} {thing}"
    if chance(rng, 0.5):
        said = f"{said} and the {other(rng, THINGS, thing)} is no surprise"
    told = (
        int(kind != denied) if known else 0
    )  # as if there were no `not`; what it does not know it takes for blame
    return Row({"sentence": said}, kind, told)


COLA = World(
    "cola",
    grammatical,
    2,
    "Sentences about a royal court; half of them with one of four mistakes of grammar.",
)
SST2 = World(
    "sst2",
    sentiment,
    2,
    "Verdicts on films: 24 adjectives of praise or blame, some of them denied.",
)

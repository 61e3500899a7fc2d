"""The study of every merger. Knows nothing of torch, models or where results
go.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

from featcal.baselines.surgery import Surgery
from featcal.baselines.training import Training
from featcal.merging.registry import settings_of
from featcal.settings import Settings, require
from reproduction.experiments.rivals import Rivals
from reproduction.experiments.runs import Numbers

TRAINED = ("prodistill", "surgery_v2", "interv_merge")  # what trains for minutes behind a merger

TANGENT = "tangent"  # task arithmetic in the tangent space, by name in the results


class SurgeryV2(Surgery):
    """Surgery after every block and of the last feature, trained together.   rank: the authors take
    16 for ViT-B, 4 for ViT-L.
    """

    name: ClassVar[str] = "surgery_v2"
    section = name
    features: Literal["unit", "raw"] = "raw"
    reshuffle: PositiveInt | None = 2


class IntervMerge(Training):
    """Interventions on the first token of every attention's output.   rank: 1 in the authors'
    scripts, 4 in their code.
    """

    name: ClassVar[str] = "interv_merge"
    section = name
    reshuffle: PositiveInt | None = 2
    rank: PositiveInt = 1


class FieldStudy(Settings):
    """Every merger from the same experts and the same samples: as it is, with FeatCal, adapters and
    SVC behind it.

    mergers: settings by method; of a list of scales, validation samples choose one, as in the
    sources.
    samples, batch, seed: of each task, for what looks at training samples.   rows: validation
    samples of each task.
    tangent: scales of task arithmetic in the tangent space, of which validation samples choose one;
    none where it is not run, as
             where experts are not fine-tuned here.
    scored: how many test samples of each task are scored; all where None.
    trained: mergers behind which what costs minutes is put too: surgery_v2, interv_merge, and
    ProDistill in so many epochs. Methods that adapt without labels see the stream of `rivals`,
    which holds none of the samples that are scored.
    """

    section = "field"
    role: str
    pool: int
    rivals: Rivals
    mergers: Mapping[str, Mapping[str, Any]]
    samples: PositiveInt
    batch: PositiveInt
    seed: NonNegativeInt
    rows: PositiveInt
    trained: tuple[str, ...]
    surgery_v2: SurgeryV2
    interv_merge: IntervMerge
    epochs: PositiveInt
    tangent: Numbers = ()
    scored: PositiveInt | None = None

    def check(self) -> None:
        for merger in self.trained:
            require(
                merger in self.mergers,
                "field.trained",
                merger,
                f"must be one of {', '.join(self.mergers)}",
            )
        scored = "must hold other samples than are scored: train, or unlabelled"
        require(
            self.rivals.stream != "test_unlabelled",
            "field.rivals.stream",
            self.rivals.stream,
            scored,
        )
        for method in self.mergers:
            for scale in self.scales(method) or (None,):
                more = {} if scale is None else {"scale": scale}
                settings_of(method, {**self.settings(method), **more}, f"field.mergers.{method}")

    def behind(self, merger: str) -> list[str]:
        """What is put behind a merger, by method: `featcal_best` is FeatCal at its preset best."""
        return [
            "featcal",
            "featcal_best",
            "surgery",
            "prob_surgery",
            "svc",
            *(TRAINED if merger in self.trained else ()),
        ]

    def scales(self, method: str) -> tuple[float, ...]:
        """The scales of a method of which validation samples choose one; none where its settings
        hold no list.
        """
        given = self.mergers[method].get("scale")
        return tuple(given) if isinstance(given, list) else ()

    def settings(self, method: str) -> dict[str, Any]:
        """The settings of a method, but for a scale that is chosen."""
        return {
            key: value
            for key, value in self.mergers[method].items()
            if key != "scale" or not self.scales(method)
        }

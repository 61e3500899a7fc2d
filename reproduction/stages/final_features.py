"""Rows about the final features of one task: how like the expert's they are, image by image, and
where they lie in a plane.

Features are of length one, as the classifier sees them. n images, p width of a feature.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from featcal.evaluation.zero_shot import Samples

PROJECTED = 100  # images per task in the plane
KEPT = 500  # images of the shown task whose cosines are kept one by one

Row = dict[str, Any]


def evenly(count: int, most: int) -> list[int]:
    """At most `most` indices, evenly over all `count` images, which some data sets list class by
    class.
    """
    if count <= most:
        return list(range(count))
    return [i * count // most for i in range(most)]


def projected(
    model: "nn.Module", projection: "Tensor | None", images: "Samples", batch: int, place: str
) -> "Tensor":
    """Features of a whole image set as they leave the projection, (n, p), on the CPU. Raises:
    NotFinite naming `place`.
    """
    import torch

    from featcal.evaluation.zero_shot import projected_features, require_finite

    batches = images.batches(None, batch)
    features = torch.cat(
        [projected_features(model, projection, inputs).cpu() for inputs in batches]
    )
    require_finite(features, place)
    return features


def cosines(features: "Tensor", expert: "Tensor") -> "Tensor":
    """Cosine of every image's feature to the expert's: (n, p), (n, p) -> (n,)."""
    return (features * expert).double().sum(-1)


def alignment_row(line: Row, features: "Tensor", expert: "Tensor") -> Row:
    """Mean cosine and distance to the expert over all images, and the cosines' standard deviation
    from image to image.
    """
    found = cosines(features, expert)
    distance = (features - expert).double().norm(dim=-1).mean()
    spread = float(found.std()) if len(found) > 1 else 0.0
    return line | {
        "cosine": float(found.mean()),
        "cosine_sd": spread,
        "l2": float(distance),
        "count": len(found),
    }


def similarity_rows(line: Row, features: "Tensor", expert: "Tensor") -> Iterator[Row]:
    """The cosine of single images, at most KEPT of them."""
    words = {column: line[column] for column in ("task", "method", "setting")}
    found = cosines(features, expert).tolist()
    yield from (words | {"index": i, "similarity": found[i]} for i in evenly(len(found), KEPT))


def projection_rows(task: str, labels: Any, features: Mapping[str, "Tensor"]) -> Iterator[Row]:
    """Two principal components of all the models' features (n, p) together, so that all share their
    axes.
    """
    import torch

    count = len(next(iter(features.values())))
    chosen = evenly(count, PROJECTED)
    shown = {model: f[chosen].double() for model, f in features.items()}
    joint = torch.cat(list(shown.values()))  # (models · n, p)
    _, _, directions = torch.linalg.svd(joint - joint.mean(0), full_matrices=False)
    axes = (
        directions[:2] * directions[:2].sum(1, keepdim=True).sign()
    )  # a principal direction has no sign of its own
    for model, f in shown.items():
        for i, (x, y) in zip(chosen, ((f - joint.mean(0)) @ axes.T).tolist(), strict=True):
            yield {
                "task": task,
                "model": model,
                "index": i,
                "label": int(labels[i]),
                "x": x,
                "y": y,
            }
